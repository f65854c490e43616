"""The drop-in names on a real tritonserver: HTTP, gRPC, streams, cancelling, its start and end."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from mfs_trt.client import Client
from mfs_trt.errors import (
    FamilyError,
    RequestCancelledError,
    ServerError,
)
from mfs_trt.sampling_params import SamplingParams
from mfs_trt.serving.launcher import TritonServer
from probes import num_failed, wait_idle, wait_until
from streams import Stream

pytestmark = pytest.mark.triton

PROMPT = "the river moves"
LONG = {"text_input": PROMPT, "max_tokens": 400, "stream": True, "ignore_eos": True}
TEXT_MODELS = ("ensemble", "tensorrt_llm_bls", "family")


def post(server, path: str, body: dict) -> tuple[int, str]:
    url = f"http://127.0.0.1:{server.http_port}/v2/models/{path}"
    request = urllib.request.Request(url, json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def generate(server, model: str, **body) -> dict:
    status, text = post(server, f"{model}/generate", body)
    assert status == 200, text
    return json.loads(text)


@pytest.fixture
def client(server):
    with Client(f"127.0.0.1:{server.grpc_port}") as made:
        yield made


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_generate_answers_once_with_the_prompt_in_front(server, model, offline_text):
    expected = offline_text(PROMPT, "large", 9)
    answer = generate(server, model, text_input=PROMPT, max_tokens=9)
    assert answer["text_output"] == PROMPT + expected
    assert (answer["tier_used"], answer["finish_reason"]) == ("large", "length")
    bare = generate(
        server, model, text_input=PROMPT, max_tokens=9, exclude_input_in_output=True, tier="small"
    )
    assert bare["text_output"] == offline_text(PROMPT, "small", 9)
    assert bare["tier_used"] == "small"


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_generate_stream_sends_the_same_text_in_pieces(server, model, offline_text):
    status, body = post(
        server, f"{model}/generate_stream", {"text_input": PROMPT, "max_tokens": 9, "stream": True}
    )
    chunks = [json.loads(line.removeprefix("data: ")) for line in body.split("\n\n") if line]
    assert status == 200
    assert "".join(c["text_output"] for c in chunks) == offline_text(PROMPT, "large", 9)
    assert [bool(c["finish_reason"]) for c in chunks] == [False] * (len(chunks) - 1) + [True]


def test_tensorrt_llm_takes_and_gives_token_ids(server, llm):
    ids = llm.tokenizer.encode(PROMPT)
    expected = llm.generate([ids], SamplingParams(max_tokens=5))[0].outputs[0].token_ids
    fields = {"input_ids": ids, "input_lengths": len(ids), "request_output_len": 5}
    answer = generate(server, "tensorrt_llm", **fields)
    assert answer["output_ids"] == ids + expected
    assert answer["sequence_length"] == len(ids) + 5
    stream = Stream(
        server.grpc_port,
        {**fields, "streaming": True},
        model="tensorrt_llm",
        outputs=("output_ids", "sequence_length"),
    ).finish()
    assert stream.values("output_ids") == expected
    assert sum(stream.values("sequence_length")) == 5


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_the_final_flag_rides_on_the_last_tokens_response(server, model):
    fields = {"text_input": PROMPT, "max_tokens": 5, "stream": True}
    stream = Stream(server.grpc_port, fields, model=model).finish()
    flags = [
        r.get_response().parameters["triton_final_response"].bool_param for r in stream.results
    ]
    assert flags == [False] * (len(flags) - 1) + [True]
    assert len(stream.times_s) == len(stream.results)  # nothing came after it, nor without tokens


def test_the_canonical_request_of_tensorrt_llm_clients_works(server):
    answer = generate(
        server, "ensemble", text_input=PROMPT, max_tokens=4, bad_words="", stop_words="",
        pad_id=2, beam_width=1, top_k=1, top_p=0, temperature=1.0, length_penalty=1.0,
    )  # fmt: skip
    assert answer["text_output"].startswith(PROMPT)


def test_a_field_that_is_not_served_is_refused_by_name(server, client):
    status, body = post(
        server, "ensemble/generate", {"text_input": PROMPT, "max_tokens": 4, "beam_width": 4}
    )
    assert status == 400 and "beam_width" in body and "UnsupportedFieldError" in body
    status, body = post(
        server, "ensemble/generate", {"text_input": PROMPT, "max_tokens": 4, "temprature": 4}
    )
    assert status == 400 and "temprature" in body
    with pytest.raises(FamilyError, match="tier"):
        client.generate(PROMPT, tier="huge")


def test_the_shape_of_openai_frontend_requests_is_served(server):
    stream = Stream(
        server.grpc_port,
        {
            "text_input": PROMPT, "stream": True, "max_tokens": 6, "stop_words": ["zzz"],
            "top_p": 1.0, "temperature": 0.0, "frequency_penalty": 0.0, "presence_penalty": 0.0,
            "seed": 0, "return_num_input_tokens": True, "return_num_output_tokens": True,
        },
        outputs=("text_output", "num_input_tokens", "num_output_tokens"),
    ).finish()  # fmt: skip
    assert sum(stream.values("num_output_tokens")) == 6
    assert len(set(stream.values("num_input_tokens"))) == 1


def test_chat_messages_are_answered(client, llm):
    messages = [{"role": "user", "content": "hello"}]
    params = SamplingParams(max_tokens=6)
    text = "".join(chunk.text for chunk in client.stream(messages=messages, params=params))
    assert text == llm.chat(messages, params)[0].outputs[0].text


def test_the_client_gets_every_field_that_its_chunks_have(client, llm):
    params = SamplingParams(max_tokens=4, return_log_probs=True, return_generation_logits=True)
    expected = llm.generate([PROMPT], params)[0].outputs[0]
    chunks = list(client.stream(PROMPT, params))
    assert "".join(chunk.text for chunk in chunks) == expected.text
    log_probs = [value for chunk in chunks for value in chunk.log_probs]
    assert log_probs == pytest.approx(list(expected.log_probs), abs=1e-5)
    assert chunks[-1].cumulative_log_prob == pytest.approx(sum(log_probs), abs=1e-5)
    assert chunks[-1].finish_reason and {chunk.tier for chunk in chunks} == {"large"}
    assert sum(len(c.logits) for c in chunks if c.num_new_tokens) == len(expected.token_ids)


def test_several_sequences_come_back_by_index(client):
    params = SamplingParams(max_tokens=6, n=3, temperature=1.0, seed=5, return_log_probs=True)
    completions = client.generate(PROMPT, params)
    assert [c.num_tokens for c in completions] == [len(c.log_probs) for c in completions]
    assert len({c.text for c in completions}) > 1
    assert completions == client.generate(PROMPT, params)


@pytest.mark.parametrize("model", ("ensemble", "family"))
def test_a_client_that_cancels_its_stream_stops_the_work(slow_server, model):
    failed_before = num_failed(slow_server)
    slow_server.set("step_delay_s", "0.05")  # it would take 20 s
    stream = Stream(slow_server.grpc_port, LONG, model=model).wait_first()
    stream.disconnect()
    wait_idle(slow_server)
    assert num_failed(slow_server) == failed_before + 1


def test_stop_through_tensorrt_llm_cancels_a_request_of_ensemble(slow_server):
    slow_server.set("step_delay_s", "0.05")
    stream = Stream(slow_server.grpc_port, LONG, request_id="stop-me").wait_first()
    stop = Stream(
        slow_server.grpc_port,
        {"input_ids": [1], "input_lengths": 1, "request_output_len": 1, "stop": True},
        model="tensorrt_llm",
        request_id="stop-me",
        outputs=("output_ids",),
    ).finish()
    assert stop.error is None and stop.results == []
    assert "CANCELLED" in (stream.finish().error or "")


def test_the_client_cancels_by_request_id(slow_server):
    slow_server.set("step_delay_s", "0.05")
    params = SamplingParams(max_tokens=400, ignore_eos=True)
    with Client(f"127.0.0.1:{slow_server.grpc_port}") as client:
        stream = client.stream(PROMPT, params, request_id="mine")
        next(stream)
        client.cancel("mine")
        client.cancel("unknown")
        with pytest.raises(RequestCancelledError):
            list(stream)


# -- starting and ending -------------------------------------------------------------------------


@pytest.fixture
def scratch(tmp_path, monkeypatch):
    """Where servers put their temporary folders."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def leftovers(scratch: Path, launcher_pid: int) -> list[Path]:
    """What a server leaves behind: nothing, whatever its end."""
    shared = Path("/dev/shm").glob(f"mfs-trt-{launcher_pid}-*")
    return [*scratch.glob("mfs-trt-*"), *shared]


def test_an_engine_folder_that_does_not_exist_is_one_clear_line(scratch):
    with pytest.raises(ServerError, match=r"serve\.json: engine: no such folder: \S+/nowhere$"):
        TritonServer(scratch / "nowhere").start()
    assert not list(scratch.glob("mfs-trt-*"))


def test_a_killed_worker_ends_the_streams_of_its_clients(engine_dir, scratch):
    shared = set(leftovers(scratch, os.getpid()))
    with TritonServer(engine_dir) as server:
        fields = {"text_input": PROMPT, "max_tokens": 480, "stream": True, "ignore_eos": True}
        stream = Stream(server.grpc_port, fields).wait_first()
        os.kill(server.stub_pid, signal.SIGKILL)
        assert server.wait(timeout_s=60)
        stream.finish()
        assert stream.error
        wait_until(lambda: server.failure is not None)
        assert f"worker process {server.stub_pid} died" in server.failure
    assert set(leftovers(scratch, os.getpid())) == shared


def test_serve_ends_cleanly_on_sigterm(engine_dir, scratch):
    process = subprocess.Popen(
        [sys.executable, "-m", "mfs_trt", "serve", "--engine", str(engine_dir),
         "--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("tiers:"):
            break
    assert any(line.startswith("ready: HTTP http://127.0.0.1:") for line in lines), lines
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert "stopped" in output
    assert not leftovers(scratch, process.pid)
