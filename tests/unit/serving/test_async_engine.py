"""The async engine: streams, cancels, deadlines, ids, the queue and its figures."""

import threading

import pytest

from mfs_trt.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    QueueFullError,
    RequestCancelledError,
    RequestTooLargeError,
)
from mfs_trt.request import FinishReason, TokenEvent
from served import PROMPT, WAIT_S, Inbox, alone

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
