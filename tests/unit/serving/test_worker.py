"""The worker on stand-ins: requests in, responses out, and nothing left open whatever happens."""

import json
import time

import numpy as np
import pytest

from fakes import FakeAsyncEngine, FakeError, FakePbUtils, FakeRequest, wait_until
from mfs_trt.errors import (
    DeadlineExceededError,
    EngineFailedError,
    EngineUnavailableError,
    QueueFullError,
    RequestTooLargeError,
)
from mfs_trt.serving import worker as worker_module
from mfs_trt.serving.config import ServeConfig
from mfs_trt.serving.triton_spec import TICKET
from mfs_trt.serving.worker import Worker

FAST = ServeConfig(engine="e", cancel_poll_s=0.01, ticket_period_s=0.01, metrics_period_s=0.01)
TEXT_OUTPUTS = ("text_output", "finish_reason", "output_log_probs", "num_output_tokens")


@pytest.fixture
def engine():
    return FakeAsyncEngine()


@pytest.fixture
def pb_utils():
    return FakePbUtils()


@pytest.fixture
def worker(pb_utils, engine):
    made = Worker(pb_utils, engine, FAST)
    yield made
    made.finalize()


def request(text="hi", *, stream=True, request_id="", outputs=None, **fields):
    tensors = {"text_input": np.array([[text.encode()]], dtype=np.object_)}
    tensors["stream"] = np.array([[stream]])
    for name, value in fields.items():
        dtype = {bool: np.bool_, int: np.int32, str: np.object_}[type(value)]
        value = value.encode() if isinstance(value, str) else value
        tensors[name] = np.array([[value]], dtype=dtype)
    return FakeRequest(tensors, request_id=request_id, outputs=outputs)


def send(worker, *args, **fields) -> FakeRequest:
    made = request(*args, **fields)
    worker.execute([made])
    return made


def texts(responses):
    return [r["text_output"].item().decode() for r in responses]


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
    time.sleep(0.02)
    assert sender.responses == []
    engine.emit("b", ends="length")
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


# -- through an ensemble -------------------------------------------------------------------------


def first_step(worker, **fields):
    made = send(worker, outputs=(TICKET,), **fields)
    wait_until(lambda: made.sender.responses)
    return made.sender


def second_step(worker, first, *, is_client_gone=False):
    made = FakeRequest({TICKET: first.responses[-1][TICKET]}, outputs=TEXT_OUTPUTS)
    made.is_client_gone = is_client_gone
    worker.execute([made])
    return made.sender


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
    time.sleep(0.02)
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


# -- loading and unloading -----------------------------------------------------------------------


def test_unloading_answers_everything_that_is_open(pb_utils, engine):
    worker = Worker(pb_utils, engine, FAST)
    streamed, unclaimed = send(worker).sender, first_step(worker)
    worker.finalize()
    assert streamed.finish()[-1].error.code == FakeError.UNAVAILABLE
    assert unclaimed.is_final
    assert engine.is_shut_down


def test_an_engine_that_forgets_a_request_does_not_leave_its_stream_open(pb_utils, engine):
    worker = Worker(pb_utils, engine, FAST)
    sender = send(worker).sender
    engine._callbacks.clear()
    worker.finalize()
    assert "unloaded" in sender.finish()[-1].error.message


def test_ready_follows_the_engine(worker, engine):
    assert worker.is_ready()
    engine.is_healthy = False
    assert not worker.is_ready()
    engine.is_healthy, engine.is_draining = True, True
    assert not worker.is_ready()


def load_args(folder, **parameters):
    config = {"parameters": {k: {"string_value": v} for k, v in parameters.items()}}
    (folder / "1").mkdir()
    return {
        "model_config": json.dumps(config),
        "model_name": "family",
        "model_version": "1",
        "model_repository": str(folder),
    }


def test_loading_takes_parameters_of_tensorrt_llm_templates(tmp_path, pb_utils, engine, caplog):
    args = load_args(
        tmp_path, gpt_model_path=str(tmp_path), max_queue_size="7", kv_cache_onboard_blocks="true",
        cancellation_check_period_ms="${cancellation_check_period_ms}", stats_check_period_ms="",
    )  # fmt: skip
    seen = []

    def make_engine(config):
        seen.append(config)
        return engine

    worker = Worker.load(args, pb_utils, make_engine)
    worker.finalize()
    assert seen == [ServeConfig(engine=str(tmp_path), max_queue_size=7)]
    assert "without effect here: kv_cache_onboard_blocks" in caplog.text


def test_a_load_failure_is_one_line_that_names_file_and_key(tmp_path, pb_utils, engine):
    args = load_args(tmp_path)
    (tmp_path / "1" / "serve.json").write_text('{"engine": "/nowhere"}')
    with pytest.raises(pb_utils.TritonModelException, match="serve.json: engine: no such folder"):
        Worker.load(args, pb_utils, lambda config: engine)

    def explode(config):
        raise RuntimeError("two\nlines")

    (tmp_path / "1" / "serve.json").write_text(json.dumps({"engine": str(tmp_path)}))
    with pytest.raises(pb_utils.TritonModelException, match="^RuntimeError: two lines$"):
        Worker.load(args, pb_utils, explode)


# -- metrics -------------------------------------------------------------------------------------


def test_metrics_follow_the_engine_and_the_finished_sequences(worker, engine, pb_utils):
    sender = send(worker).sender
    engine.emit("ab")
    wait_until(lambda: sender.responses)
    engine.emit("c", ends="length")
    sender.finish()
    engine.num_output_tokens = 40
    tokens = ("mfs_output_tokens_total", {"tier": "small"})
    wait_until(lambda: pb_utils.metric(tokens[0], **tokens[1]).value == 40)
    engine.num_output_tokens = 45
    wait_until(lambda: pb_utils.metric(tokens[0], **tokens[1]).value == 45)
    assert pb_utils.metric("mfs_rows_total", segment="0").value == 30
    assert pb_utils.metric("mfs_reused_tokens_total", segment="0").value == 16
    assert pb_utils.metric("mfs_draft_tokens_total").value == 8
    assert pb_utils.metric("mfs_accepted_draft_tokens_total").value == 6
    block = "nv_trt_llm_kv_cache_block_metrics"
    values = {
        name: pb_utils.metric(block, kv_cache_block_type=name).value
        for name in ("max", "used", "free", "tokens_per", "fraction")
    }
    assert values == {"max": 100, "used": 25, "free": 75, "tokens_per": 16, "fraction": 0.25}
    assert pb_utils.metric("nv_trt_llm_request_metrics", request_type="waiting").value == 1
    lengths = ("nv_llm_output_token_len", {"response_metric_type": "total_output_tokens"})
    wait_until(lambda: pb_utils.metric(lengths[0], **lengths[1]).observed == [3.0])
    assert len(pb_utils.metric("mfs_time_to_first_token_seconds", tier="small").observed) == 1
    assert pb_utils.metric("mfs_engine_healthy").value == 1
    engine.is_healthy = False
    wait_until(lambda: pb_utils.metric("mfs_engine_healthy").value == 0)


def test_a_server_without_metrics_serves_all_the_same(engine):
    worker = Worker(FakePbUtils(has_metrics=False), engine, FAST)
    sender = send(worker).sender
    engine.emit("a", ends="length")
    assert texts(sender.finish()) == ["a"]
    worker.finalize()
