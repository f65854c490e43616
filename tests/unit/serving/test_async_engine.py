"""The async engine: every open request is answered, whatever the engine thread is doing."""

import threading
from collections.abc import Callable

import pytest

from mfs_trt.errors import (
    DeadlineExceededError,
    EngineFailedError,
    EngineUnavailableError,
    InvalidRequestError,
    QueueFullError,
    RequestCancelledError,
    RequestTooLargeError,
)
from mfs_trt.request import FinishReason, PromptRequest, TokenEvent
from mfs_trt.sampling_params import SamplingParams
from mfs_trt.serving import core as core_module
from mfs_trt.serving.async_engine import MAX_FAILED_STEPS, AsyncEngine
from mfs_trt.serving.core import EngineCore
from tiny import run_alone, tiny_engine, tiny_family, tiny_model

MODEL = tiny_model(tiny_family((1, 2, 4)))
PROMPT = [3, 1, 4, 1, 5]
WAIT_S = 20.0  # until something that must happen counts as missing


class Inbox:
    """Collects one request's events; `ended` is set by the last one."""

    def __init__(self, num_sequences: int = 1) -> None:
        self.events: list[TokenEvent] = []
        self.threads: set[str] = set()
        self.ended = threading.Event()
        self.has_token = threading.Event()
        self._num_open = num_sequences

    def __call__(self, event: TokenEvent) -> None:
        self.events.append(event)
        assert not self.ended.is_set(), "an event after the last one"
        self.threads.add(threading.current_thread().name)
        self._num_open -= event.finish_reason is not None
        if event.token_ids:
            self.has_token.set()
        if event.error is not None or self._num_open == 0:
            self.ended.set()

    def wait(self) -> "Inbox":
        assert self.ended.wait(WAIT_S), "the request was never ended"
        return self

    @property
    def token_ids(self) -> list[int]:
        return [t for e in self.events for t in e.token_ids]

    @property
    def error(self) -> Exception | None:
        return self.events[-1].error


class Gate:
    """Holds the engine inside `execute` while it is closed."""

    def __init__(self, core: EngineCore) -> None:
        self._execute = core.engine.execute
        self._is_open = threading.Event()
        self._is_open.set()
        self.entered = threading.Event()
        core.engine.execute = self._wait  # type: ignore[method-assign]

    def _wait(self, step):
        self.entered.set()
        assert self._is_open.wait(WAIT_S)
        return self._execute(step)

    def close(self) -> None:
        self.entered.clear()
        self._is_open.clear()

    def open(self) -> None:
        self._is_open.set()


class Served:
    """A started engine over a real core, with a gate before its steps."""

    def __init__(self, *, max_queue_size: int = 64, **engine_settings) -> None:
        self.core = EngineCore(tiny_engine(MODEL, **engine_settings), tokenizer=None)
        self.gate = Gate(self.core)
        self.engine = AsyncEngine(self.core, max_queue_size)
        self.engine.start()
        self.threads = [self.engine._engine_thread, self.engine._response_thread]

    def submit(
        self, name: str, *, on_event: Callable | None = None, n: int = 1, max_tokens=4, **fields
    ) -> Inbox:
        inbox = Inbox(n)
        sampled = {"temperature": 1.0, "seed": 1} if n > 1 else {}
        params = SamplingParams(max_tokens=max_tokens, end_id=-1, n=n, **sampled)
        request = PromptRequest(name, params, token_ids=PROMPT, **fields)
        self.engine.submit(request, on_event or inbox)
        return inbox

    def hold_a_step(self) -> Inbox:
        """Leave a request's step waiting at the gate; returns its inbox."""
        self.gate.close()
        inbox = self.submit("held")
        assert self.gate.entered.wait(WAIT_S)
        return inbox

    def settle(self) -> None:
        """Run a request to its end: what was aborted before it is gone."""
        self.gate.open()
        assert self.submit("settle").wait().error is None


@pytest.fixture
def serve():
    """A function that starts a `Served`; all are shut down at the end."""
    running: list[Served] = []

    def make(**settings) -> Served:
        running.append(Served(**settings))
        return running[-1]

    yield make
    for served in running:
        served.gate.open()
        served.engine.shutdown()


def alone(tier: str = "t2", max_tokens: int = 4) -> list[int]:
    return run_alone(MODEL, PROMPT, tier, SamplingParams(max_tokens=max_tokens, end_id=-1))


# -- streams -------------------------------------------------------------------------------------


def test_request_streams_the_tokens_that_it_gets_alone(serve):
    inbox = serve().submit("r", tier="t1").wait()
    assert inbox.token_ids == alone("t1")
    assert [e.num_output_tokens for e in inbox.events] == [1, 2, 3, 4]
    assert {e.request_id for e in inbox.events} == {"r"}
    assert inbox.events[-1].finish_reason is FinishReason.LENGTH


def test_many_threads_are_served_together_and_answered_by_one(serve):
    served = serve(max_num_seqs=4, num_frames=60)
    inboxes: dict[str, Inbox] = {}

    def client(i: int) -> None:
        for k in range(3):
            inboxes[f"{i}-{k}"] = served.submit(f"{i}-{k}", tier=f"t{i % 3}").wait()

    threads = [threading.Thread(target=client, args=(i,)) for i in range(9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    expected = [alone(f"t{tier}") for tier in range(3)]
    assert len(inboxes) == 27
    for name, inbox in inboxes.items():
        assert inbox.token_ids == expected[int(name[0]) % 3]
        assert inbox.threads == {"mfs-responses"}


def test_request_with_several_sequences_ends_with_the_last_of_them(serve):
    inbox = serve().submit("r", n=3).wait()
    assert len(inbox.token_ids) == 3 * 4
    ends = [e.sequence_index for e in inbox.events if e.finish_reason is not None]
    assert sorted(ends) == [0, 1, 2]


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"prompt": "two of them"}, InvalidRequestError),
        ({"max_tokens": 124}, RequestTooLargeError),
    ],
)
def test_request_that_cannot_be_served_is_refused_at_once(serve, fields, error):
    served = serve()
    with pytest.raises(error):
        served.submit("r", **fields)
    assert served.engine.stats().num_open_requests == 0
    assert served.submit("r").wait().error is None  # the id was not taken


# -- cancel and deadlines ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["held", "waiting"])
def test_cancel_is_answered_while_a_step_is_slow_and_frees(serve, name):
    served = serve(max_num_seqs=1)
    inboxes = {"held": served.hold_a_step(), "waiting": served.submit("waiting")}
    assert served.engine.cancel(name)
    assert isinstance(inboxes[name].wait().error, RequestCancelledError)
    assert served.gate.entered.is_set()  # the step is still held
    served.settle()
    assert len(inboxes[name].events) == 1
    assert served.engine.stats().num_frames_used == 0
    served.core.scheduler.kv_cache.check_integrity()


def test_request_cancelled_while_it_decodes_keeps_the_tokens_it_had(serve):
    served = serve()
    inbox = Inbox()

    def on_event(event: TokenEvent) -> None:
        if not inbox.events:
            served.gate.close()
        inbox(event)

    served.submit("r", on_event=on_event, max_tokens=100)
    assert inbox.has_token.wait(WAIT_S)
    assert served.engine.cancel("r")
    assert isinstance(inbox.wait().error, RequestCancelledError)
    assert inbox.token_ids == alone(max_tokens=len(inbox.token_ids))
    served.settle()
    assert served.engine.stats().num_frames_used == 0


def test_cancelling_what_is_not_open_says_so(serve):
    served = serve()
    served.submit("r").wait()
    assert not served.engine.cancel("r")
    assert not served.engine.cancel("never")


def test_cancelled_twice_is_answered_once(serve):
    served = serve()
    inbox = served.hold_a_step()
    assert served.engine.cancel("held")
    assert not served.engine.cancel("held")
    inbox.wait()
    served.settle()
    assert len(inbox.events) == 1


def test_deadline_is_answered_while_a_step_is_slow(serve):
    served = serve()
    served.hold_a_step()
    inbox = served.submit("late", deadline_s=0.03, max_tokens=100)
    other = served.submit("patient", deadline_s=3600.0)
    assert isinstance(inbox.wait().error, DeadlineExceededError)
    assert "late missed its deadline of 30 ms" in str(inbox.error)
    assert served.gate.entered.is_set() and not other.events  # the step is still held
    served.gate.open()
    assert other.wait().token_ids == alone()
    served.settle()
    assert served.engine.stats().num_frames_used == 0


def test_request_that_ends_before_its_deadline_hears_nothing_of_it(serve):
    served = serve()
    inbox = served.submit("r", deadline_s=3600.0).wait()
    with served.engine._lock:  # an hour passes
        served.engine._deadlines = [(0.0, serial) for _, serial in served.engine._deadlines]
    assert isinstance(served.submit("x", deadline_s=0.0).wait().error, DeadlineExceededError)
    assert not served.engine._deadlines
    assert inbox.error is None and len(inbox.events) == 4


# -- ids -----------------------------------------------------------------------------------------


def test_id_of_an_open_request_is_refused(serve):
    served = serve()
    inbox = served.hold_a_step()
    with pytest.raises(InvalidRequestError, match="request_id: .* not in use, got 'held'"):
        served.submit("held")
    served.gate.open()
    assert inbox.wait().token_ids == alone()


def test_id_is_free_right_after_cancel(serve):
    served = serve()
    first = served.hold_a_step()
    assert served.engine.cancel("held")
    second = served.submit("held", tier="t0")
    assert isinstance(first.wait().error, RequestCancelledError)
    served.gate.open()
    assert second.wait().token_ids == alone("t0")


def test_id_is_free_in_the_callback_of_the_last_event(serve):
    served = serve()
    again: list[Inbox] = []
    done = threading.Event()

    def on_event(event: TokenEvent) -> None:
        if event.finish_reason is not None:
            try:
                again.append(served.submit("r"))
            finally:
                done.set()

    served.submit("r", on_event=on_event)
    assert done.wait(WAIT_S)
    assert again[0].wait().token_ids == alone()


# -- the queue -----------------------------------------------------------------------------------


def test_request_beyond_the_queue_limit_is_refused_and_room_comes_back(serve):
    served = serve(max_queue_size=3, max_num_seqs=1)
    held = served.hold_a_step()
    accepted = [served.submit("q0"), served.submit("q1", n=2)]
    with pytest.raises(QueueFullError, match="3 requests wait, max_queue_size is 3"):
        served.submit("q2")
    assert served.engine.stats().num_waiting == 3
    served.gate.open()
    for inbox in (held, *accepted):
        assert inbox.wait().error is None
    assert served.submit("q2").wait().error is None


def test_sequences_of_a_request_count_one_by_one(serve):
    served = serve(max_queue_size=2)
    with pytest.raises(QueueFullError):
        served.submit("r", n=3)


# -- failures ------------------------------------------------------------------------------------


class Fault(Exception):
    pass


def break_stage(served: Served, stage: str, monkeypatch) -> Callable[[], None]:
    """Make a stage of the step raise; returns what repairs it."""
    owner, name = {
        "schedule": (core_module.Scheduler, "schedule"),
        "prepare": (core_module, "prepare"),
        "execute": (served.core.engine, "execute"),
        "sample": (core_module, "sample_rows"),
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


# -- the end -------------------------------------------------------------------------------------


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

    served.engine._take_commands = counted  # type: ignore[method-assign]
    stopper = threading.Thread(target=served.engine.shutdown)
    stopper.start()
    release.wait(0.2)
    release.set()
    stopper.join(WAIT_S)
    assert not stopper.is_alive() and turns <= 5


# -- figures -------------------------------------------------------------------------------------


def test_stats_count_what_was_done(serve):
    served = serve(max_num_seqs=2)
    served.submit("a", tier="t0").wait()
    served.submit("b", tier="t2", n=2).wait()
    served.hold_a_step()
    served.submit("late", deadline_s=0.0).wait()
    stats = served.engine.stats()
    assert stats.num_requests_finished_total == 2
    assert stats.num_requests_failed_total == 1
    assert stats.num_prompt_tokens_total == 2 * len(PROMPT)
    assert stats.num_output_tokens_total == 3 * 4
    assert stats.output_tokens_by_tier == {"t0": 4, "t2": 8}
    assert (stats.num_running, stats.num_open_requests) == (1, 1)
    assert stats.num_frames_total == served.core.scheduler.kv_cache.pool.num_usable_frames
    assert stats.num_frames_used == 2 * 4  # five tokens in blocks of four, four layer groups
    assert stats.num_steps_total >= 8 and stats.last_step_duration_s > 0
    assert stats.is_healthy and not stats.is_draining


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
