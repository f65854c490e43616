"""What people complained of in load, limits, slow clients, memory and configuration."""

import json
import random
import re
import shutil
import threading
import time

import grpc
import pytest
import torch
from tritonclient.grpc import InferRequestedOutput, service_pb2_grpc
from tritonclient.grpc._utils import _get_inference_request

from mfs_trt.errors import RequestTooLargeError, ServerError
from mfs_trt.request import PromptRequest
from mfs_trt.sampling_params import SamplingParams
from mfs_trt.serving.core import EngineCore
from mfs_trt.serving.launcher import TritonServer
from probes import (
    HttpStream,
    generate,
    num_active,
    num_waiting,
    post,
    resident_nbytes,
    shared_nbytes,
    used_frames,
    wait_idle,
    wait_until,
)
from streams import Burst, Stream, tensors
from tiny import drain, run_alone, submit, tiny_engine, tiny_family, tiny_model

pytestmark = pytest.mark.triton

PROMPT = "the river moves"
MIB = 1 << 20


def start(
    server,
    *,
    model: str = "ensemble",
    request_id: str = "",
    timeout_us: int | None = None,
    **fields,
) -> Stream:
    asked = {"text_input": PROMPT, "max_tokens": 400, "ignore_eos": True, "stream": True, **fields}
    return Stream(
        server.grpc_port, asked, model=model, request_id=request_id, timeout_us=timeout_us
    )


# -- 33, 34, 45: sizes ---------------------------------------------------------------------------


def test_row_33_a_request_larger_than_the_arena_is_refused_at_once_even_while_a_step_hangs(
    slow_server,
):
    """Row 33: a request larger than the KV pool deadlocks the scheduler."""
    asked = {"text_input": PROMPT, "max_tokens": 480, "tier": "large"}
    needed, available = slow_server.expected_frames(asked)
    assert needed > available
    slow_server.set("hold")
    other = start(slow_server, max_tokens=12)
    status, text = post(slow_server, "ensemble/generate", asked)
    assert status == 400
    assert "RequestTooLargeError" in text
    assert f"needs {needed} KV frames" in text and f"arena's {available}" in text
    slow_server.clear("hold")
    assert other.finish().text
    wait_until(lambda: used_frames(slow_server) == 0)


def test_row_34_one_huge_request_leaves_room_for_small_ones(slow_server):
    """Row 34: one huge max_tokens blocks all."""
    asked = {"text_input": PROMPT, "max_tokens": 440, "tier": "large"}
    little = {"text_input": f"{PROMPT}, one two three four " * 3, "max_tokens": 4, "tier": "large"}
    needed, available = slow_server.expected_frames(asked)
    assert needed <= available  # the huge one fits, but reserved it would leave no room for a small
    assert slow_server.expected_frames(little)[0] > available - needed
    slow_server.set("hold")
    huge = start(slow_server, **asked)
    slow_server.step_until(lambda: huge.results)
    small = [start(slow_server, **little) for _ in range(5)]
    wait_until(lambda: num_active(slow_server) == 6)
    slow_server.clear("hold")
    assert all(s.finish().error is None for s in small)
    assert not huge.is_done
    huge.disconnect()
    wait_until(lambda: used_frames(slow_server) == 0)


def test_row_34_a_huge_request_that_was_overtaken_finishes_with_the_same_tokens(slow_server):
    """Row 34: one huge max_tokens blocks all."""
    slow_server.clear("step_delay_s")
    asked = {"text_input": PROMPT, "max_tokens": 440, "tier": "large"}
    huge = start(slow_server, **asked).wait_first()
    others = [start(slow_server, max_tokens=60, tier="large") for _ in range(6)]
    params = SamplingParams(max_tokens=440, ignore_eos=True)
    expected = slow_server.offline.generate(PROMPT, params, tier="large")[0].outputs[0]
    assert huge.finish().text == expected.text
    assert all(o.finish().error is None for o in others)


@pytest.fixture(scope="module")
def model():
    return tiny_model(tiny_family(), torch.float64)


BLOCK = 4


@pytest.mark.parametrize("prompt_length", (1, BLOCK - 1, BLOCK, BLOCK + 1, 23))
@pytest.mark.parametrize("chunk", (1, BLOCK - 1, BLOCK, BLOCK + 1, 64))
def test_row_45_chunks_of_any_size_give_the_same_tokens(model, chunk, prompt_length):
    """Row 45: chunking options crash the engine."""
    prompt = [random.Random(i).randrange(61) for i in range(prompt_length)]
    params = SamplingParams(max_tokens=6)
    for tier in ("t0", "t2"):
        engine = tiny_engine(model, block_size=BLOCK, max_num_batched_tokens=chunk, max_num_seqs=1)
        core = EngineCore(engine, tokenizer=None)
        submit(core, PromptRequest("r", params, token_ids=prompt, tier=tier))
        events = drain(core)
        assert [t for e in events for t in e.token_ids] == run_alone(model, prompt, tier, params)
        assert core.num_steps == -(-prompt_length // chunk) + 5
        core.scheduler.kv_cache.check_integrity()
        assert core.scheduler.kv_cache.num_used_frames == 0


def test_row_45_the_longest_request_runs_and_one_token_more_is_refused(model):
    """Row 45: chunking options crash the engine."""
    limit = 32
    engine = tiny_engine(model, block_size=BLOCK, max_num_batched_tokens=5, max_model_len=limit)
    core = EngineCore(engine, tokenizer=None)
    submit(core, PromptRequest("r", SamplingParams(max_tokens=1), token_ids=[1] * (limit - 1)))
    assert len(drain(core)) == 1
    with pytest.raises(RequestTooLargeError, match="33 tokens, more than .* max_model_len of 32"):
        submit(core, PromptRequest("r", SamplingParams(max_tokens=2), token_ids=[1] * (limit - 1)))


@pytest.mark.parametrize("max_tokens", (1, 100))
def test_row_45_a_prompt_beyond_max_model_len_is_an_error(server, llm, max_tokens):
    """Row 45: a prompt longer than the limit crashes the engine."""
    long = "one two three four " * 200
    count = len(llm.tokenizer.encode(long))
    assert count > 512
    refused = start(server, text_input=long, max_tokens=max_tokens).finish()
    assert f"prompt of {count} tokens" in refused.error and "max_model_len of 512" in refused.error
    status, text = post(server, "ensemble/generate", {"text_input": long, "max_tokens": max_tokens})
    assert status == 400 and "RequestTooLargeError" in text
    assert generate(server, text_input=PROMPT, max_tokens=3)["text_output"]


# -- 46, 47: too much at once --------------------------------------------------------------------


def test_row_46_the_queue_is_bounded_visible_and_served_in_time(slow_server):
    """Row 46: minutes to the first token behind an unbounded queue."""
    small = {"text_input": PROMPT, "max_tokens": 4, "ignore_eos": True}
    seats, limit = slow_server.max_num_seqs, slow_server.max_queue_size
    slow_server.set("hold")
    longer = {**small, "max_tokens": 60}  # enough to run until all are let in, and then some
    running = Burst(slow_server.grpc_port, [longer] * seats)
    slow_server.let_in(seats)
    burst = Burst(slow_server.grpc_port, [small] * (limit + 40))
    burst.wait(num_errors=40)  # refused at once, while nothing moves
    wait_until(lambda: num_waiting(slow_server) == limit)
    assert len(burst.errors) == 40 and not burst.texts
    assert all(f"max_queue_size is {limit}" in error for error in burst.errors)
    steps_before = slow_server.work()[0]
    slow_server.clear("hold")
    burst.finish()
    running.finish()
    # A seat serves one after the other; a prompt may take a few steps beside others' decodes.
    num_rounds = -(-limit // seats)
    most = longer["max_tokens"] + num_rounds * (small["max_tokens"] + 4)
    assert slow_server.work()[0] - steps_before <= most
    assert len(set(burst.texts.values())) == 1 and len(burst.texts) == limit
    wait_idle(slow_server)


@pytest.mark.parametrize("model_name", ("family", "ensemble"))
def test_row_47_tritons_request_timeout_is_kept_while_a_step_hangs(slow_server, model_name):
    """Row 47: queue timeout does nothing."""
    slow_server.set("hold")
    busy = start(slow_server, max_tokens=20)
    num_steps = slow_server.work()[0]
    late = start(slow_server, model=model_name, timeout_us=200_000).finish()
    assert "DeadlineExceededError" in late.error and "deadline of 200 ms" in late.error
    assert 0.2 <= late.times_s[-1] - late.started_s < 5
    assert slow_server.work()[0] == num_steps
    slow_server.clear("hold")
    busy.finish()


def test_row_47_a_deadline_is_kept_over_http_while_a_step_hangs(slow_server):
    """Row 47: queue timeout does nothing."""
    slow_server.set("hold")
    busy = start(slow_server, max_tokens=20)
    started = time.monotonic()
    status, text = post(
        slow_server, "ensemble/generate", {"text_input": PROMPT, "deadline_ms": 200}
    )
    assert 0.2 <= time.monotonic() - started < 5
    assert status == 400 and "DeadlineExceededError" in text
    slow_server.clear("hold")
    busy.finish()


def test_row_47_a_timeout_in_an_http_body_is_kept_or_refused_by_name(slow_server):
    """Row 47: queue timeout does nothing."""
    slow_server.set("step_delay_s", "0.05")
    body = {"text_input": PROMPT, "max_tokens": 20, "ignore_eos": True, "timeout": 200_000}
    status, text = post(slow_server, "ensemble/generate", body)
    assert status == 400 and ("deadline of 200 ms" in text or "timeout" in text), text


# -- 48, 49: long running ------------------------------------------------------------------------


def run_mixed(server, count: int) -> None:
    """Requests that finish, fail, are stopped and whose clients go away, `count` in all."""
    for first in range(0, count, 20):
        asked = [
            {"text_input": f"{PROMPT} {i}", "max_tokens": 1 + i % 9, "ignore_eos": True}
            for i in range(first, first + 12)
        ]
        asked[1]["tier"], asked[3]["max_tokens"] = "huge", 100_000
        asked[5] |= {"return_log_probs": True, "return_generation_logits": True}
        burst = Burst(server.grpc_port, asked)
        gone = [HttpStream(server, text_input=PROMPT, max_tokens=99) for _ in range(4)]
        left, stopped = (start(server, request_id=name, max_tokens=99) for name in ("a", "b"))
        for client in (*gone[:2], left, stopped):
            client.wait_first()
        for client in (*gone, left):
            client.disconnect()
        start(server, request_id="b", stop=True).finish()
        stopped_error = stopped.finish().error  # None when it was faster than the stop
        assert stopped_error is None or "CANCELLED" in stopped_error
        for body in ({"text_input": PROMPT, "beam_width": 4}, {"max_tokens": 2}):
            assert post(server, "ensemble/generate", body)[0] == 400
        burst.finish()
        assert len(burst.errors) == 2
    wait_idle(server)


def assert_memory_is_flat(server, *, warm_up: int, count: int, limit_nbytes: int) -> None:
    run_mixed(server, warm_up)
    before = [resident_nbytes(server.stub_pid), resident_nbytes(server.pid), shared_nbytes(server)]
    run_mixed(server, count)
    after = [resident_nbytes(server.stub_pid), resident_nbytes(server.pid), shared_nbytes(server)]
    stub, triton, shared = (b - a for a, b in zip(before, after, strict=True))
    print(f"growth over {count} requests: stub {stub}, server {triton}, /dev/shm {shared} bytes")
    assert stub < limit_nbytes
    assert triton < 4 * limit_nbytes  # Triton's own pools; ours is the stub
    assert shared < MIB


def test_row_48_memory_is_flat_over_300_requests(server):
    """Row 48: memory grows."""
    assert_memory_is_flat(server, warm_up=160, count=300, limit_nbytes=12 * MIB)


@pytest.mark.slow
def test_row_48_memory_is_flat_over_5000_requests(server):
    """Row 48: memory grows."""
    assert_memory_is_flat(server, warm_up=1000, count=5000, limit_nbytes=24 * MIB)


class SilentGrpcClient:
    """Asks for a large streamed answer and never reads it."""

    def __init__(self, server) -> None:
        asked = {
            "text_input": PROMPT, "max_tokens": 480, "ignore_eos": True, "stream": True,
            "return_log_probs": True, "return_generation_logits": True,
        }  # fmt: skip
        outputs = [InferRequestedOutput(n) for n in ("text_output", "generation_logits")]
        request = _get_inference_request(
            "ensemble", tensors(asked), "", "", outputs, 0, False, False, 0, None, None
        )
        self._channel = grpc.insecure_channel(
            f"127.0.0.1:{server.grpc_port}", options=[("grpc.http2.bdp_probe", 0)]
        )
        stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._call = stub.ModelStreamInfer(iter([request]))

    def disconnect(self) -> None:
        self._call.cancel()
        self._channel.close()


def silent_http_client(server) -> HttpStream:
    return HttpStream(
        server, receive_nbytes=4096, text_input=PROMPT, max_tokens=480, ignore_eos=True,
        return_log_probs=True, return_generation_logits=True,
    )  # fmt: skip


@pytest.mark.parametrize("make_client", (SilentGrpcClient, silent_http_client))
def test_row_49_a_client_that_stops_reading_stalls_nobody(server, offline_text, make_client):
    """Row 49: ResponseSend hangs on a slow consumer."""
    wait_idle(server)
    silent = [make_client(server) for _ in range(3)]
    expected = offline_text(PROMPT, "small", 20)
    for _ in range(5):
        done = start(server, tier="small", max_tokens=20, ignore_eos=False).finish()
        assert done.text == expected
    burst = Burst(
        server.grpc_port, [{"text_input": PROMPT, "max_tokens": 20, "tier": "small"}] * 20
    ).finish()
    assert set(burst.texts.values()) == {expected}
    for client in silent:
        client.disconnect()
    wait_until(lambda: used_frames(server) == 0)


# -- 50: bad configuration -----------------------------------------------------------------------

LOAD_ERRORS = {
    "missing_engine": r"serve\.json: engine: no such folder: \S+/nowhere",
    "unfilled": r"serve\.json: engine: expected a value, got the unfilled '\$\{engine_dir\}'",
    "bad_json": r"serve\.json: not valid JSON: ",
    "unknown_key": r"serve\.json: unknown keys max_batch; known: engine, ",
    "no_serve_json": r"serve\.json: engine: expected an engine folder, got none",
    "corrupt_engine": r"corrupt/engine\.json: malformed: .*block_size",
    "truncated_engine": r"truncated/engine\.json: not valid JSON: ",
}


@pytest.mark.parametrize("name", LOAD_ERRORS)
def test_row_50_a_bad_configuration_is_one_line_that_names_file_and_key(mixed_server, name):
    """Row 50: cryptic start-up errors."""
    reason = mixed_server.load_errors()[name]
    assert re.search(LOAD_ERRORS[name], reason), reason
    assert "\n" not in reason and "\\n" not in reason and "Traceback" not in reason
    assert not mixed_server.is_model_ready(name)


def test_row_50_models_beside_a_bad_one_are_served(mixed_server):
    """Row 50: cryptic start-up errors."""
    assert set(mixed_server.load_errors()) == set(LOAD_ERRORS)
    assert mixed_server.is_model_ready("sentencepiece")
    assert start(mixed_server, model="sentencepiece", max_tokens=4).finish().text
    status, text = post(mixed_server, "unfilled/generate", {"text_input": PROMPT})
    assert status == 404 and "unfilled" in text


def test_row_50_a_corrupt_engine_ends_the_start_with_its_file_and_key(engine_dir, tmp_path):
    """Row 50: cryptic start-up errors."""
    folder = shutil.copytree(engine_dir, tmp_path / "corrupt")
    manifest = json.loads((folder / "engine.json").read_text())
    manifest["limits"]["max_seqs"] = 8
    (folder / "engine.json").write_text(json.dumps(manifest))
    with pytest.raises(ServerError, match=r"engine\.json: malformed: .*max_seqs") as error:
        TritonServer(folder).start()
    assert "\n" not in str(error.value)


# -- the end -------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_name", ("ensemble", "family"))
def test_a_stopping_server_lets_a_running_stream_finish(engine_dir, llm, model_name):
    with TritonServer(engine_dir, exit_timeout_s=300) as server:
        running = start(server, model=model_name, max_tokens=300).wait_first()
        started = time.monotonic()
        stopper = threading.Thread(target=server.stop)
        stopper.start()
        running.finish()
        stopper.join()
        assert time.monotonic() - started < 150
    params = SamplingParams(max_tokens=300, ignore_eos=True)
    assert running.text == llm.generate(PROMPT, params)[0].outputs[0].text
