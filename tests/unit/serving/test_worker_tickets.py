"""Requests that come to the worker through an ensemble, in two steps."""

import numpy as np

from fakes import FakeError, FakeRequest, wait_until
from mfs_trt.serving import worker as worker_module
from mfs_trt.serving.triton_spec import TICKET
from worker_requests import answer_another, first_step, second_step, texts


def test_a_ticket_opens_the_stream_of_answers(worker, engine):
    first = first_step(worker)
    assert engine.requests == []
    answers = second_step(worker, first)
    engine.emit("a", ends="length")
    wait_until(lambda: first.is_final)  # no ticket is out: the first step ends, then the answer
    if not answers.is_final:
        second_step(worker, first)
    assert texts(answers.finish()) == ["a"]


def test_the_last_answer_waits_for_the_tickets_that_are_out(worker, engine):
    first = first_step(worker)
    answers = second_step(worker, first)
    wait_until(lambda: len(first.responses) == 2)  # a ticket that asks after the client
    engine.emit("a", ends="length")
    wait_until(lambda: first.is_final)
    answer_another(worker, engine)  # whatever the response thread had to send before is sent
    assert answers.responses == []
    returned = second_step(worker, first)
    assert returned.finish() == []
    assert texts(answers.finish()) == ["a"]


def test_a_ticket_that_finds_the_client_gone_cancels_the_request(worker, engine):
    first = first_step(worker)
    answers = second_step(worker, first)
    wait_until(lambda: len(first.responses) == 2)
    second_step(worker, first, is_client_gone=True)
    wait_until(lambda: first.is_final)
    assert answers.finish()[-1].error.code == FakeError.CANCELLED
    assert engine.cancelled == [engine.requests[0].request_id]


def test_a_client_that_is_gone_before_the_ticket_is_never_submitted(worker, engine):
    answers = second_step(worker, first_step(worker), is_client_gone=True)
    assert answers.finish()[-1].error.code == FakeError.CANCELLED
    assert engine.requests == []


def test_an_invented_ticket_is_refused(worker):
    made = FakeRequest({TICKET: np.array([[123]], np.uint64)})
    worker.execute([made])
    assert made.sender.finish()[0].error.code == FakeError.INVALID_ARG


def test_a_ticket_that_never_comes_back_does_not_keep_the_answer(worker, engine, monkeypatch):
    monkeypatch.setattr(worker_module, "TICKET_LIFE_S", 0.03)
    first = first_step(worker)
    answers = second_step(worker, first)
    wait_until(lambda: len(first.responses) == 2)
    engine.emit("a", ends="length")
    assert texts(answers.finish()) == ["a"]
