"""The worker loads, unloads, says how it is and what it has done."""

import json

import pytest

from fakes import FakeError, FakePbUtils, wait_until
from mfs_trt.serving.config import ServeConfig
from mfs_trt.serving.worker import Worker
from worker_requests import FAST, first_step, send, texts


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
    assert pb_utils.metric("mfs_draft_tokens_total", tier="small").value == 8
    assert pb_utils.metric("mfs_accepted_draft_tokens_total", tier="small").value == 6
    switches = pb_utils.metric("mfs_tier_switches_total", policy="cascade", direction="up")
    assert switches.value == 4
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
