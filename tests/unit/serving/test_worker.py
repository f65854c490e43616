"""The worker on stand-ins: requests in, responses out, and nothing left open whatever happens."""

import numpy as np
import pytest

from fakes import FakeError, FakeRequest, wait_until
from mfs_trt.errors import (
    DeadlineExceededError,
    EngineFailedError,
    EngineUnavailableError,
    QueueFullError,
    RequestTooLargeError,
)
from mfs_trt.serving import worker as worker_module
from worker_requests import answer_another, request, send, texts


def test_a_streamed_request_gets_its_tokens_and_the_final_flag_with_the_last(worker, engine):
    sender = send(worker).sender
    engine.emit("a")
    wait_until(lambda: len(sender.responses) == 1)
    assert not sender.is_final
    engine.emit("b", ends="length")
    assert texts(sender.finish()) == ["a", "b"]
    reasons = [r["finish_reason"].item() for r in sender.responses]
    assert reasons == [b"", b"length"]


def test_events_that_wait_for_one_sequence_become_one_response(worker, engine):
    sender = send(worker, return_log_probs=True, return_num_output_tokens=True).sender
    with worker._dispatcher._wake:  # the response thread is busy elsewhere
        for text in "abc":
            engine.emit(text, log_probs=(-1.0,))
        engine.emit("d", ends="stop", log_probs=(-2.0,))
    (response,) = sender.finish()
    assert response["text_output"].item() == b"abcd"
    assert response["output_log_probs"].tolist() == [[[-1.0, -1.0, -1.0, -2.0]]]
    assert response["num_output_tokens"].item() == 4


def test_an_unstreamed_request_gets_exactly_one_response_with_its_prompt(worker, engine):
    sender = send(worker, "hi ", stream=False).sender
    engine.emit("a")
    answer_another(worker, engine)  # whatever the response thread had to send before is sent
    assert sender.responses == []
    engine.emit("b", ends="length", request=0)
    (response,) = sender.finish()
    assert response["text_output"].item() == b"hi ab"
    assert response["output_ids"].reshape(-1).tolist() == [ord(c) for c in "hi ab"]
    assert response["sequence_length"].item() == 5


def test_nothing_is_sent_before_the_first_token(worker, engine):
    sender = send(worker).sender
    engine.emit("")
    engine.emit("a", ends="length")
    assert texts(sender.finish()) == ["a"]


def test_counts_of_new_tokens_add_up_to_the_output(worker, engine):
    sender = send(worker, return_num_output_tokens=True).sender
    for i, text in enumerate(("ab", "c", "def")):
        engine.emit(text, ends="length" if i == 2 else None)
    assert sum(r["num_output_tokens"].item() for r in sender.finish()) == 6


def test_every_sequence_is_answered_and_the_final_flag_comes_last(worker, engine):
    sender = send(worker, num_return_sequences=2, stream=False).sender
    engine.emit("a", sequence_index=1, ends="length")
    wait_until(lambda: len(sender.responses) == 1)
    assert not sender.is_final
    engine.emit("b", sequence_index=0, ends="stop")
    assert [r["sequence_index"].item() for r in sender.finish()] == [1, 0]


def test_rows_of_a_batch_share_the_sender_and_end_with_one_final_flag(worker, engine):
    both = FakeRequest({"text_input": np.array([[b"a"], [b"b"]], dtype=np.object_)})
    worker.execute([both])
    engine.emit("x", request=1, ends="length")
    engine.fail(DeadlineExceededError("late"), request=0)
    responses = both.sender.finish()
    assert responses[0]["batch_index"].item() == 1 and responses[0].error is None
    assert "late" in responses[1].error.message


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RequestTooLargeError("too large"), FakeError.INVALID_ARG),
        (QueueFullError("full"), FakeError.UNAVAILABLE),
        (EngineUnavailableError("draining"), FakeError.UNAVAILABLE),
        (RuntimeError("bug"), FakeError.INTERNAL),
    ],
)
def test_a_request_that_the_engine_refuses_gets_one_final_error(worker, engine, error, code):
    engine.submit_error = error
    (response,) = send(worker).sender.finish()
    assert response.error.code == code
    assert str(error) in response.error.message


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (EngineFailedError("step failed"), FakeError.INTERNAL),
        (DeadlineExceededError("deadline of 200 ms"), FakeError.UNAVAILABLE),
    ],
)
def test_a_request_that_fails_on_the_way_gets_its_tokens_then_the_error(
    worker, engine, error, code
):
    sender = send(worker).sender
    engine.emit("a")
    engine.fail(error)
    responses = sender.finish()
    assert texts(responses[:-1]) == ["a"]
    assert responses[-1].error.code == code
    assert responses[-1].error.message.endswith(f"{type(error).__name__}: {error}")


def test_an_unreadable_request_is_refused_and_others_are_served(worker, engine):
    broken = FakeRequest({"text_input": np.array([[b"\xff"]], dtype=np.object_)})
    good = request()
    worker.execute([broken, good])
    assert broken.sender.finish()[0].error.code == FakeError.INVALID_ARG
    engine.emit("a", ends="length")
    assert texts(good.sender.finish()) == ["a"]


def test_a_bug_in_reading_a_request_is_answered_not_raised(worker, monkeypatch):
    def fail(*args, **kwargs):
        raise ZeroDivisionError("bug")

    monkeypatch.setattr(worker_module, "parse_request", fail)
    (response,) = send(worker).sender.finish()
    assert response.error.code == FakeError.INTERNAL and "bug" in response.error.message


def test_a_response_that_cannot_be_sent_ends_its_request_only(worker, engine):
    broken, good = send(worker).sender, send(worker).sender
    broken.fail_next = True
    engine.emit("a", request=0)
    assert broken.finish()[-1].error.code == FakeError.INTERNAL
    assert engine.cancelled == [engine.requests[0].request_id]
    engine.emit("b", request=1, ends="length")
    assert texts(good.finish()) == ["b"]


def test_a_client_that_went_away_is_cancelled_within_a_poll(worker, engine):
    sender = send(worker).sender
    engine.emit("a")
    sender.is_client_gone = True
    assert sender.finish()[-1].error.code == FakeError.CANCELLED
    assert engine.cancelled == [engine.requests[0].request_id]


def test_stop_cancels_every_request_of_its_id_and_is_answered_with_nothing(worker, engine):
    mine = [send(worker, request_id="7").sender for _ in range(2)]
    other = send(worker, request_id="8").sender
    stop = send(worker, request_id="7", stop=True).sender
    assert stop.finish() == []
    for sender in mine:
        assert sender.finish()[-1].error.code == FakeError.CANCELLED
    assert not other.is_final


def test_stop_of_an_unknown_id_is_no_error_but_a_missing_id_is(worker):
    assert send(worker, request_id="unknown", stop=True).sender.finish() == []
    (response,) = send(worker, stop=True).sender.finish()
    assert response.error.code == FakeError.INTERNAL and "request id" in response.error.message


def test_equal_request_ids_of_two_clients_do_not_meet_in_the_engine(worker, engine):
    send(worker, request_id="1")
    send(worker, request_id="1")
    assert len({r.request_id for r in engine.requests}) == 2


def test_a_misspelt_request_parameter_is_refused_by_name(worker):
    made = request()
    made._parameters = {"temprature": 1}
    worker.execute([made])
    assert "temprature" in made.sender.finish()[0].error.message
