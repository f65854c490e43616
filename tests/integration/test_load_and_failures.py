"""The real server under load, failing clients, a failing engine and too much to do."""

import random

import pytest

from probes import is_ready, num_waiting, used_frames, wait_until
from streams import Stream

pytestmark = pytest.mark.triton

TIERS = ("small", "medium", "large")
STAGES = ("schedule", "prepare", "execute", "sample", "respond")


def prompt(i: int) -> str:
    rng = random.Random(i)
    words = ["river", "stone", "gravity", "light", "the", "a", "of", "and", "moves", "é", "日本"]
    return " ".join(rng.choice(words) for _ in range(rng.randint(1, 30)))


def fields(i: int, **more) -> dict:
    return {
        "text_input": prompt(i),
        "max_tokens": 4 + i % 29,
        "tier": TIERS[i % 3],
        "stream": True,
        **more,
    }


def test_64_streams_of_mixed_tiers_get_the_offline_texts(server, offline_text):
    streams = [Stream(server.grpc_port, fields(i)) for i in range(64)]
    texts = [s.finish().text for s in streams]
    assert texts == [
        offline_text(f["text_input"], f["tier"], f["max_tokens"]) for f in map(fields, range(64))
    ]


def test_streamed_chunks_concatenate_to_the_unstreamed_text(server):
    for i in range(6):
        streamed = Stream(server.grpc_port, fields(i)).finish()
        whole = Stream(
            server.grpc_port, fields(i, stream=False, exclude_input_in_output=True)
        ).finish()
        assert len(whole.chunks) == 1
        assert streamed.text == whole.text


def test_50_clients_killed_in_mid_stream_leave_all_frames_free(slow_server):
    slow_server.set("hold")
    streams = [Stream(slow_server.grpc_port, fields(i, max_tokens=200)) for i in range(50)]
    slow_server.let_in(50)
    slow_server.step_until(lambda: sum(bool(s.results) for s in streams) >= 8)
    for stream in streams:
        stream.disconnect()
    slow_server.clear("hold")
    wait_until(lambda: used_frames(slow_server) == 0)
    assert is_ready(slow_server)
    assert Stream(slow_server.grpc_port, fields(1)).finish().text


@pytest.mark.parametrize("stage", STAGES)
def test_an_exception_in_the_engine_thread_ends_every_open_stream_with_an_error(
    slow_server, stage, offline_text
):
    slow_server.set("hold")
    streams = [Stream(slow_server.grpc_port, fields(i, max_tokens=200)) for i in range(6)]
    slow_server.let_in(6)
    slow_server.step_until(lambda: all(s.results for s in streams))
    slow_server.set("fault", stage)
    slow_server.clear("hold")
    for stream in streams:
        stream.finish()
    slow_server.clear("fault")
    assert all(f"injected at {stage}" in (s.error or "") for s in streams), [
        s.error for s in streams
    ]
    after = Stream(slow_server.grpc_port, fields(2)).finish()
    expected = fields(2)
    assert after.text == offline_text(
        expected["text_input"], expected["tier"], expected["max_tokens"]
    )
    wait_until(lambda: used_frames(slow_server) == 0)


def test_a_request_larger_than_the_arena_is_refused_while_others_run_on(slow_server):
    other = Stream(slow_server.grpc_port, fields(0, max_tokens=40)).wait_first()
    huge = Stream(slow_server.grpc_port, fields(2, max_tokens=400)).finish()
    needed, available = slow_server.expected_frames(fields(2, max_tokens=400))
    assert needed > available
    assert f"needs {needed} KV frames" in huge.error and str(available) in huge.error
    assert other.finish().text


def test_a_deadline_in_a_saturated_server_is_answered_before_a_seat_comes_free(slow_server):
    slow_server.set("hold")
    busy = [Stream(slow_server.grpc_port, fields(i, max_tokens=200)) for i in range(8)]
    slow_server.let_in(8)
    num_steps = slow_server.work()[0]
    late = Stream(slow_server.grpc_port, fields(3, deadline_ms=200)).finish()
    assert "deadline of 200 ms" in late.error
    assert late.times_s[-1] - late.started_s >= 0.2
    assert slow_server.work()[0] == num_steps  # while the very same step hangs
    for stream in busy:
        stream.disconnect()
    slow_server.clear("hold")
    wait_until(lambda: used_frames(slow_server) == 0)


def test_one_more_than_the_queue_limit_is_refused_with_unavailable(slow_server):
    slow_server.set("hold")
    running = [
        Stream(slow_server.grpc_port, fields(i, max_tokens=100))
        for i in range(slow_server.max_num_seqs)
    ]
    slow_server.let_in(len(running))
    queued = [Stream(slow_server.grpc_port, fields(i)) for i in range(slow_server.max_queue_size)]
    wait_until(lambda: num_waiting(slow_server) == slow_server.max_queue_size)
    refused = Stream(slow_server.grpc_port, fields(1)).finish()
    assert "QueueFullError" in refused.error and "UNAVAILABLE" in refused.error.upper()
    assert f"max_queue_size is {slow_server.max_queue_size}" in refused.error
    slow_server.clear("hold")
    for stream in running:
        stream.disconnect()
    assert all(s.finish().text for s in queued)
