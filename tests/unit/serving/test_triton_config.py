"""Generated `config.pbtxt` files, against Triton server's own message definition."""

from importlib import resources
from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from mfs_trt.serving.triton_config import inputs_of, outputs_of, render_config
from mfs_trt.serving.triton_spec import (
    BLS,
    ENSEMBLE,
    INPUTS,
    MODELS,
    OUTPUTS,
    TENSORRT_LLM,
    TICKET,
    WORKER,
)

# Names, types and dims of TensorRT-LLM's templates (triton_conventions.md 3.1 and 3.2).
TEMPLATE_INPUTS = {
    ENSEMBLE: """
        text_input STRING 1 · max_tokens INT32 1 · decoder_text_input STRING 1
        num_return_sequences INT32 1 · bad_words STRING -1 · stop_words STRING -1
        exclude_input_in_output BOOL 1 · end_id INT32 1 · pad_id INT32 1 · top_k INT32 1
        top_p FP32 1 · temperature FP32 1 · length_penalty FP32 1 · repetition_penalty FP32 1
        presence_penalty FP32 1 · frequency_penalty FP32 1 · min_tokens INT32 1
        min_length INT32 1 · seed UINT64 1 · random_seed UINT64 1 · return_log_probs BOOL 1
        return_context_logits BOOL 1 · return_generation_logits BOOL 1
        return_perf_metrics BOOL 1 · return_num_input_tokens BOOL 1
        return_num_output_tokens BOOL 1 · beam_width INT32 1 · stream BOOL 1
        prompt_embedding_table FP16 -1,-1 · prompt_table_extra_id UINT64 1
        prompt_vocab_size INT32 1 · embedding_bias_words STRING -1
        embedding_bias_weights FP32 -1 · lora_task_id UINT64 1 · lora_weights FP16 -1,-1
        lora_config INT32 -1,3 · guided_decoding_guide_type STRING 1
        guided_decoding_guide STRING 1 · tier STRING 1 · min_tier STRING 1 · max_tier STRING 1
        priority INT32 1 · deadline_ms INT32 1
    """,
    TENSORRT_LLM: """
        input_ids INT32 -1 · input_lengths INT32 1 · request_output_len INT32 1
        draft_input_ids INT32 -1 · draft_logits FP32 -1,-1 · draft_acceptance_threshold FP32 1
        decoder_input_ids INT32 -1 · decoder_input_lengths INT32 1 · end_id INT32 1
        pad_id INT32 1 · stop_words_list INT32 2,-1 · bad_words_list INT32 2,-1
        embedding_bias FP32 -1 · beam_width INT32 1 · temperature FP32 1 · runtime_top_k INT32 1
        runtime_top_p FP32 1 · runtime_top_p_min FP32 1 · runtime_top_p_decay FP32 1
        runtime_top_p_reset_ids INT32 1 · len_penalty FP32 1 · early_stopping BOOL 1
        repetition_penalty FP32 1 · min_tokens INT32 1 · beam_search_diversity_rate FP32 1
        presence_penalty FP32 1 · frequency_penalty FP32 1 · seed UINT64 1
        return_log_probs BOOL 1 · return_context_logits BOOL 1 · return_generation_logits BOOL 1
        return_perf_metrics BOOL 1 · return_num_input_tokens BOOL 1
        return_num_output_tokens BOOL 1 · exclude_input_in_output BOOL 1 · stop BOOL 1
        streaming BOOL 1 · prompt_embedding_table FP16 -1,-1 · prompt_table_extra_ids UINT64 -1
        prompt_vocab_size INT32 1 · lora_task_id UINT64 1 · lora_weights FP16 -1,-1
        lora_config INT32 -1,3 · retention_token_range_starts INT32 -1
        retention_token_range_ends INT32 -1 · retention_token_range_priorities INT32 -1
        retention_token_range_durations_ms INT32 -1 · retention_decode_priority INT32 1
        retention_decode_duration_ms INT32 1 · guided_decoding_guide_type STRING 1
        guided_decoding_guide STRING 1 · lookahead_window_size INT32 1
        lookahead_ngram_size INT32 1 · lookahead_verification_set_size INT32 1
        num_return_sequences INT32 1 · tier STRING 1 · deadline_ms INT32 1 · priority INT32 1
    """,
}
COMMON_OUTPUTS = """
    cum_log_probs FP32 -1 · output_log_probs FP32 -1,-1 · context_logits FP32 -1,-1
    generation_logits FP32 -1,-1,-1 · batch_index INT32 1 · sequence_index INT32 1
    kv_cache_alloc_new_blocks INT32 1 · kv_cache_reused_blocks INT32 1
    kv_cache_alloc_total_blocks INT32 1 · arrival_time_ns INT64 1
    first_scheduled_time_ns INT64 1 · first_token_time_ns INT64 1 · last_token_time_ns INT64 1
    acceptance_rate FP32 1 · total_accepted_draft_tokens INT32 1 · total_draft_tokens INT32 1
    num_input_tokens INT32 1 · num_output_tokens INT32 1 · tier_used STRING 1
    finish_reason STRING 1
"""
TEMPLATE_OUTPUTS = {
    ENSEMBLE: "text_output STRING -1 ·" + COMMON_OUTPUTS,
    TENSORRT_LLM: "output_ids INT32 -1,-1 · sequence_length INT32 -1 ·" + COMMON_OUTPUTS,
}


def read_table(text: str) -> dict:
    rows = [row.split() for line in text.strip().splitlines() for row in line.split("·")]
    return {
        name: (dtype, tuple(int(d) for d in dims.split(",")))
        for name, dtype, dims in (row for row in rows if row)
    }


def parse_config(model: str):
    return text_format.Parse(render_config(model), model_config_pb2.ModelConfig())


def declared(tensors) -> dict:
    names = model_config_pb2.DataType.Name
    return {t.name: (names(t.data_type).removeprefix("TYPE_"), tuple(t.dims)) for t in tensors}


@pytest.mark.parametrize("model", MODELS)
def test_committed_config_equals_the_generator(model):
    with resources.as_file(resources.files("mfs_trt.model_repo")) as folder:
        committed = (Path(folder) / model / "config.pbtxt").read_text(encoding="utf-8")
    assert committed == render_config(model), (
        "run: python -c 'from pathlib import Path; from mfs_trt.serving.triton_config import "
        'write_model_repository as w; w(Path("model_repo"))\''
    )


@pytest.mark.parametrize("model", MODELS)
def test_config_is_valid_and_complete_without_auto_complete(model):
    config = parse_config(model)
    assert config.name == model
    assert config.max_batch_size > 0
    assert len(config.input) == len(inputs_of(model))
    assert len(config.output) == len(outputs_of(model))
    if model == WORKER:
        assert config.backend == "python" and config.model_transaction_policy.decoupled
        assert [(g.count, g.kind) for g in config.instance_group] == [(1, 2)]  # KIND_CPU
        assert all(tensor.optional for tensor in config.input)
    else:
        assert config.platform == "ensemble"


@pytest.mark.parametrize("model", TEMPLATE_INPUTS)
def test_every_tensor_of_tensorrt_llm_is_declared_with_its_type_and_dims(model):
    config = parse_config(model)
    inputs, outputs = declared(config.input), declared(config.output)
    assert read_table(TEMPLATE_INPUTS[model]).items() <= inputs.items()
    assert read_table(TEMPLATE_OUTPUTS[model]).items() == outputs.items()


@pytest.mark.parametrize("model", [m for m in MODELS if m != WORKER])
def test_ensemble_steps_connect_every_tensor_to_the_worker(model):
    config, worker = parse_config(model), parse_config(WORKER)
    first, second = config.ensemble_scheduling.step
    assert first.model_name == second.model_name == WORKER
    assert set(first.input_map.values()) == set(declared(config.input))
    assert dict(first.output_map) == dict(second.input_map) == {TICKET: TICKET}
    assert dict(second.output_map) == {name: name for name in declared(config.output)}
    worker_inputs, own_inputs = declared(worker.input), declared(config.input)
    for name, own_name in first.input_map.items():
        assert worker_inputs[name] == own_inputs[own_name]


def test_only_tensorrt_llm_requires_inputs():
    required = {m: [i.name for i in parse_config(m).input if not i.optional] for m in MODELS}
    assert required.pop(TENSORRT_LLM) == ["input_lengths", "request_output_len"]
    assert not any(required.values())


def test_the_alias_models_offer_the_same_outputs_and_inputs_as_ensemble():
    for spec in INPUTS:
        assert spec.bls == spec.ensemble or spec.ensemble is None
    assert {s.name for s in OUTPUTS if BLS in s.models} == {
        s.name for s in OUTPUTS if ENSEMBLE in s.models
    }
