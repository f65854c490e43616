"""What people complained of when clients cancel or go away, on the real server."""

import pytest

from mfs_trt.sampling_params import SamplingParams
from probes import (
    HttpStream,
    is_ready,
    num_failed,
    num_threads,
    num_waiting,
    settle,
    used_frames,
    wait_idle,
    wait_until,
)
from streams import Stream

pytestmark = pytest.mark.triton

PROMPT = "the river moves"
LONG_PROMPT = "One two three four five six, and so on. " * 16  # several chunks of a prompt
CANCEL_POLL_S, TICKET_PERIOD_S = 0.1, 0.5  # the defaults of `ServeConfig`


@pytest.fixture(autouse=True)
def _no_fault_in_the_log(slow_server):
    """The engine recovers from a failed step, so that a crash shows in the server's log only."""
    num_before = len(slow_server.read_log())
    yield
    assert "Traceback" not in slow_server.read_log()[num_before:]


def start(server, *, model: str = "ensemble", request_id: str = "", **fields) -> Stream:
    asked = {"text_input": PROMPT, "max_tokens": 400, "ignore_eos": True, "stream": True, **fields}
    return Stream(server.grpc_port, asked, model=model, request_id=request_id)


def send_stop(server, request_id: str) -> None:
    asked = {"text_input": "", "max_tokens": 1, "stop": True}
    answer = Stream(server.grpc_port, asked, request_id=request_id).finish()
    assert answer.error is None and answer.results == []


def assert_serves_as_ever(slow_server) -> None:
    """All memory is free again, and a request gets what it gets alone."""
    wait_until(lambda: used_frames(slow_server) == 0)
    expected = slow_server.offline.generate(PROMPT, SamplingParams(max_tokens=6))[0].outputs[0]
    after = start(slow_server, max_tokens=6, ignore_eos=False, return_log_probs=True).finish()
    assert after.text == expected.text
    assert is_ready(slow_server)


def test_row_9_disconnected_http_clients_leave_no_threads_and_no_memory(slow_server):
    """Row 9: client disconnect crashes the server."""
    start(slow_server, max_tokens=4).finish()
    threads_before, stub_pid = num_threads(slow_server.stub_pid), slow_server.stub_pid
    slow_server.set("hold")
    clients = [
        HttpStream(slow_server, text_input=PROMPT, max_tokens=200, ignore_eos=True, id=f"c{i}")
        for i in range(50)
    ]
    slow_server.let_in(len(clients))
    slow_server.step(3)  # whichever came first is in mid-stream, the others wait
    for client in clients:
        client.disconnect()
    slow_server.clear("hold")
    assert_serves_as_ever(slow_server)
    wait_idle(slow_server)
    wait_until(lambda: num_threads(stub_pid) <= threads_before)
    assert slow_server.stub_pid == stub_pid and slow_server.failure is None


@pytest.mark.parametrize(
    ("way", "notice_s"),
    [
        ("stop", 0.0),
        ("grpc cancel of family", CANCEL_POLL_S),
        ("grpc cancel of ensemble", TICKET_PERIOD_S),
        ("http disconnect of ensemble", TICKET_PERIOD_S),
    ],
)
@pytest.mark.parametrize("tier", ("small", "large"))
def test_row_10_a_cancelled_request_stops_computing(slow_server, way, notice_s, tier):
    """Row 10: a cancelled request keeps computing."""
    step_s = 0.05
    slow_server.set("step_delay_s", str(step_s))
    if way.startswith("http"):
        running = HttpStream(
            slow_server, text_input=PROMPT, max_tokens=400, ignore_eos=True, tier=tier
        ).wait_first()
    else:
        model = way.rsplit(" ", 1)[1] if " of " in way else "ensemble"
        running = start(slow_server, model=model, request_id="mine", tier=tier).wait_first()
    steps_before = slow_server.work()[0]
    if way == "stop":
        send_stop(slow_server, "mine")
        assert "CANCELLED" in running.finish().error
    else:
        running.disconnect()
    wait_idle(slow_server)
    num_late = slow_server.work()[0] - steps_before
    # Of 400; two seconds are for the news' way through Triton server on a busy machine.
    assert num_late <= (notice_s + 2) / step_s + 2, f"{num_late} steps after the cancel"
    assert_serves_as_ever(slow_server)


def test_row_10_stop_ends_only_the_requests_of_its_id(slow_server):
    """Row 10: a cancelled request keeps computing."""
    slow_server.set("step_delay_s", "0.05")  # "mine" would take 20 s
    mine = [start(slow_server, request_id="mine").wait_first() for _ in range(2)]
    other = start(slow_server, request_id="other", max_tokens=30)
    send_stop(slow_server, "mine")
    send_stop(slow_server, "nobody")
    assert all("CANCELLED" in m.finish().error for m in mine)
    assert other.finish().error is None
    assert_serves_as_ever(slow_server)


def queued(slow_server, **fields):
    """Every seat is taken by others."""
    slow_server.set("hold")
    others = [start(slow_server, max_tokens=300) for _ in range(slow_server.max_num_seqs)]
    slow_server.let_in(len(others))
    settle(slow_server)
    assert num_waiting(slow_server) == 0
    running = start(slow_server, **fields)
    wait_until(lambda: num_waiting(slow_server) == 1)
    return running, others


def in_a_chunk_of_the_prompt(slow_server, **fields):
    """The first chunk is computed, the second is about to be."""
    slow_server.set("hold")
    asked = {**fields, "text_input": LONG_PROMPT, "max_tokens": 20, "reuse_prefix": False}
    running = start(slow_server, **asked)
    _, rows = slow_server.work()
    slow_server.step()
    assert slow_server.work()[1] - rows == slow_server.max_num_batched_tokens
    return running, []


def decoding(slow_server, **fields):
    slow_server.set("hold")
    running = start(slow_server, **fields)
    slow_server.step(3)
    wait_until(lambda: len(running.results) == 3)
    return running, []


def before_the_last_token(slow_server, **fields):
    slow_server.set("hold")
    running = start(slow_server, **{**fields, "max_tokens": 3})
    slow_server.step(2)
    wait_until(lambda: len(running.results) == 2)
    return running, []


@pytest.mark.parametrize("has_log_probs", (False, True))
@pytest.mark.parametrize("way", ("stop", "grpc cancel"))
@pytest.mark.parametrize(
    "phase", (queued, in_a_chunk_of_the_prompt, decoding, before_the_last_token)
)
def test_row_11_a_request_can_be_cancelled_in_every_phase(slow_server, phase, way, has_log_probs):
    """Row 11: crash on cancel with streaming and log-probabilities."""
    asked = {"return_log_probs": has_log_probs, "return_generation_logits": has_log_probs}
    # A cancelled stream is noticed sooner by the worker model itself than behind the ensemble.
    model = "ensemble" if way == "stop" else "family"
    running, others = phase(slow_server, model=model, request_id="mine", **asked)
    failed_before = num_failed(slow_server)
    num_results = len(running.results)
    if way == "stop":
        send_stop(slow_server, "mine")
        # Answered while the step is held, without waiting for it.
        wait_until(lambda: "CANCELLED" in (running.error or ""))
        assert len(running.finish().results) == num_results
    else:
        running.disconnect()
        wait_until(lambda: num_failed(slow_server) > failed_before)
    slow_server.clear("hold")
    for other in others:
        other.disconnect()
    assert_serves_as_ever(slow_server)


def test_row_11_a_request_that_just_finished_can_be_cancelled(slow_server):
    """Row 11: crash on cancel with streaming and log-probabilities."""
    for i in range(20):
        running = start(slow_server, request_id="mine", max_tokens=1 + i % 3, return_log_probs=True)
        running.wait_first()
        send_stop(slow_server, "mine")
        done = running.finish()
        assert done.error is None or "CANCELLED" in done.error
        assert 1 <= len(done.results) <= 1 + i % 3
    assert_serves_as_ever(slow_server)
