"""The async engine when a part of it fails, and at its end: every open request is answered."""

import threading
from collections.abc import Callable

import pytest

from mfs_trt.errors import (
    EngineFailedError,
    EngineUnavailableError,
)
from mfs_trt.request import TokenEvent
from mfs_trt.serving import core as core_module
from mfs_trt.serving.async_engine import MAX_FAILED_STEPS
from served import WAIT_S, Served, alone


class Fault(Exception):
    pass


def break_stage(served: Served, stage: str, monkeypatch) -> Callable[[], None]:
    """Make a stage of the step raise; returns what repairs it."""
    owner, name = {
        "schedule": (core_module.Scheduler, "schedule"),
        "prepare": (core_module, "prepare"),
        "execute": (served.core.engine, "execute"),
        "sample": (core_module, "decide"),
    }[stage]

    def fail(*_):
        raise Fault(stage)

    monkeypatch.setattr(owner, name, fail)
    return monkeypatch.undo


@pytest.mark.parametrize("stage", ["schedule", "prepare", "execute", "sample"])
def test_fault_in_any_stage_ends_every_open_request_and_the_next_one_works(
    serve, stage, monkeypatch
):
    served = serve(max_num_seqs=2)
    inboxes = [served.hold_a_step()]
    inboxes += [served.submit(f"r{i}") for i in range(3)]  # some wait, some run
    repair = break_stage(served, stage, monkeypatch)
    served.gate.open()
    for inbox in inboxes:
        assert isinstance(inbox.wait().error, EngineFailedError)
        assert f"Fault: {stage}" in str(inbox.error)
    repair()
    assert served.submit("next").wait().token_ids == alone()
    stats = served.engine.stats()
    assert stats.is_healthy and stats.num_frames_used == 0
    assert stats.num_requests_failed_total == 4


def fail_once(served: Served, monkeypatch) -> None:
    repair = break_stage(served, "execute", monkeypatch)
    assert isinstance(served.submit("broken").wait().error, EngineFailedError)
    repair()


def test_engine_that_fails_several_times_in_a_row_refuses_requests(serve, monkeypatch):
    served = serve()
    for _ in range(MAX_FAILED_STEPS):
        assert served.engine.stats().is_healthy
        fail_once(served, monkeypatch)
    assert not served.engine.stats().is_healthy
    with pytest.raises(EngineUnavailableError, match="unhealthy"):
        served.submit("r")


def test_step_that_works_in_between_starts_the_count_again(serve, monkeypatch):
    served = serve()
    for _ in range(2):
        for _ in range(MAX_FAILED_STEPS - 1):
            fail_once(served, monkeypatch)
        served.settle()
    assert served.engine.stats().is_healthy


def test_preemption_total_never_falls(serve, monkeypatch):
    served = serve(max_num_seqs=1)
    held = served.hold_a_step()
    high = served.submit("high", priority=1)
    served.gate.open()
    high.wait()
    held.wait()
    assert served.engine.stats().num_preemptions_total == 1
    fail_once(served, monkeypatch)
    assert served.engine.stats().num_preemptions_total == 1


def test_broken_callback_drops_its_request_and_no_other(serve):
    served = serve()
    served.hold_a_step()
    calls = []

    def on_event(event: TokenEvent) -> None:
        calls.append(event)
        raise RuntimeError("the client is gone")

    served.submit("broken", on_event=on_event, max_tokens=50)
    other = served.submit("other")
    served.gate.open()
    assert other.wait().token_ids == alone()
    served.settle()
    assert len(calls) == 1
    stats = served.engine.stats()
    assert (stats.num_requests_finished_total, stats.num_requests_failed_total) == (3, 1)
    assert stats.num_open_requests == stats.num_frames_used == 0


def test_fault_in_the_text_of_a_request_ends_it_and_no_other(serve, monkeypatch):
    served = serve()
    served.hold_a_step()
    add_text = served.core.add_text

    def broken(event):
        if event.num_output_tokens == 5:  # only the longer request gets there
            raise Fault("no such character")
        return add_text(event)

    monkeypatch.setattr(served.core, "add_text", broken)
    longer, other = served.submit("longer", max_tokens=9), served.submit("other")
    served.gate.open()
    assert isinstance(longer.wait().error, EngineFailedError)
    assert len(longer.token_ids) == 4
    assert other.wait().token_ids == alone()
    served.settle()
    assert served.engine.stats().num_frames_used == 0


# -- the end -------------------------------------------------------------------------------------


def test_drain_refuses_new_requests_and_waits_for_open_ones(serve):
    served = serve()
    inbox = served.hold_a_step()
    assert not served.engine.drain(timeout_s=0.01)
    assert served.engine.stats().is_draining
    with pytest.raises(EngineUnavailableError, match="draining"):
        served.submit("late")
    served.gate.open()
    assert served.engine.drain(WAIT_S)
    assert inbox.ended.is_set() and inbox.token_ids == alone()


def test_drain_of_an_idle_engine_returns_at_once(serve):
    assert serve().engine.drain(timeout_s=0.0)


def test_shutdown_answers_what_is_open_before_the_step_ends_and_joins_its_threads(serve):
    served = serve(max_num_seqs=1)
    inboxes = [served.hold_a_step(), served.submit("waiting")]
    stopper = threading.Thread(target=served.engine.shutdown)
    stopper.start()
    for inbox in inboxes:
        assert isinstance(inbox.wait().error, EngineUnavailableError)
        assert "shutting down" in str(inbox.error)
    served.gate.open()
    stopper.join(WAIT_S)
    assert not stopper.is_alive()
    assert not any(thread.is_alive() for thread in served.threads)
    assert not served.core.engine.key_cache  # closed
    with pytest.raises(EngineUnavailableError):
        served.submit("late")


def test_shutdown_of_an_idle_engine_joins_its_threads_and_may_be_repeated(serve):
    served = serve()
    served.engine.shutdown()
    served.engine.shutdown()
    assert not any(thread.is_alive() for thread in served.threads)


def test_engine_thread_sleeps_while_a_slow_callback_delays_shutdown(serve):
    served = serve()
    release, entered = threading.Event(), threading.Event()

    def slow(event: TokenEvent) -> None:
        entered.set()
        assert release.wait(WAIT_S)

    served.submit("slow", on_event=slow, max_tokens=1)
    assert entered.wait(WAIT_S)
    turns = 0
    take_commands = served.engine._take_commands

    def counted() -> bool:
        nonlocal turns
        turns += 1
        if turns > 20:
            release.set()  # it spins: let the test end
        return take_commands()

    served.engine._take_commands = counted
    stopper = threading.Thread(target=served.engine.shutdown)
    stopper.start()
    release.wait(0.2)
    release.set()
    stopper.join(WAIT_S)
    assert not stopper.is_alive() and turns <= 5
