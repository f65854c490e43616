"""The tensors of the Triton models, as data: one row each, with its name under every model that has
it.

`family` is the worker model. `ensemble`, `tensorrt_llm_bls` and `tensorrt_llm` carry the names that
TensorRT-LLM's templates of the same names use; Triton server renames their tensors into the
worker's. The rows generate every `config.pbtxt` (`triton_config`) and decide what a request may say
(`triton_requests`).
"""

from dataclasses import dataclass
from enum import Enum
from typing import Any

WORKER = "family"
ENSEMBLE = "ensemble"
BLS = "tensorrt_llm_bls"
TENSORRT_LLM = "tensorrt_llm"
TICKET = "ticket"  # between the two steps of an ensemble; see `tickets`
MODELS = (WORKER, ENSEMBLE, BLS, TENSORRT_LLM)


class Use(Enum):
    """What the worker does with an input."""

    SAMPLING = "sampling"  # a field of SamplingParams
    REQUEST = "request"  # a field of PromptRequest
    OPTION = "option"  # a field of ResponseOptions, or read by `triton_requests` itself
    NO_EFFECT = "no_effect"  # accepted with any value: `reason` says why nothing can depend on it
    REFUSED = "refused"  # an error by name, unless the value is neutral or empty


@dataclass(frozen=True)
class InputSpec:
    """One input tensor. `dims` is without the batch dimension; every worker input is optional."""

    name: str  # the worker's name
    dtype: str
    dims: tuple[int, ...]
    use: Use
    field: str = ""
    ensemble: str | None = None  # None: not an input of that model
    bls: str | None = None
    tensorrt_llm: str | None = None
    required_by: tuple[str, ...] = ()  # models that declare it as required
    neutral: tuple[Any, ...] = ()  # values of a refused input that ask for nothing
    reason: str = ""

    def name_in(self, model: str) -> str | None:
        names = {
            WORKER: self.name,
            ENSEMBLE: self.ensemble,
            BLS: self.bls,
            TENSORRT_LLM: self.tensorrt_llm,
        }
        return names[model]


@dataclass(frozen=True)
class OutputSpec:
    """One output tensor; it has the same name in every model of `models`."""

    name: str
    dtype: str
    dims: tuple[int, ...]
    models: tuple[str, ...] = MODELS


def _both(
    text_name: str | None,
    token_name: str | None,
    dtype: str,
    dims: tuple[int, ...],
    use: Use,
    **more: Any,
) -> InputSpec:
    """A row: its name in the text models (also the worker's name, if any) and in `tensorrt_llm`."""
    return InputSpec(
        name=text_name or token_name or "",
        dtype=dtype,
        dims=dims,
        use=use,
        ensemble=text_name,
        bls=text_name,
        tensorrt_llm=token_name,
        **more,
    )


def _same(name: str, dtype: str, dims: tuple[int, ...], use: Use, **more: Any) -> InputSpec:
    return _both(name, name, dtype, dims, use, **more)


def _text(name: str, dtype: str, dims: tuple[int, ...], use: Use, **more: Any) -> InputSpec:
    return _both(name, None, dtype, dims, use, **more)


def _tokens(name: str, dtype: str, dims: tuple[int, ...], use: Use, **more: Any) -> InputSpec:
    return _both(None, name, dtype, dims, use, **more)


_ONE, _MANY, _ROWS = (1,), (-1,), (-1, -1)
_SAMPLING, _REQUEST, _OPTION = Use.SAMPLING, Use.REQUEST, Use.OPTION
_REFUSED, _NO_EFFECT = Use.REFUSED, Use.NO_EFFECT
_BEAMS_ONLY = "it changes beam search only, and beam_width is 1"
_NO_DRAFT_MODEL = "drafts come from the family's own tiers, not from the client"
_NO_LORA = "adapters sent by clients are not served"
_NO_ENCODER = "the family has no encoder"
_NO_PROMPT_TABLE = "prompt tuning is not served"
_NO_GUIDE = "guided decoding is not served"
_NO_LOOKAHEAD = "lookahead decoding is not served"
_NO_RETENTION = "KV eviction is least recently used for every request"
_NO_BIAS = "logit bias is not served; use bad_words to forbid words"
_NO_DECAY = "top-p decay is not served"
_ONLY_WITH_DECAY = "it changes top-p decay only, and runtime_top_p_decay is refused"

# fmt: off
INPUTS: tuple[InputSpec, ...] = (
    # The prompt: exactly one of text, messages, token ids.
    _text("text_input", "STRING", _ONE, _OPTION, field="prompt"),
    _text("messages", "STRING", _ONE, _OPTION, field="messages"),  # JSON: [{"role", "content"}, …]
    _tokens("input_ids", "INT32", _MANY, _OPTION, field="token_ids"),
    _tokens(
        "input_lengths", "INT32", _ONE, _OPTION, field="num_token_ids", required_by=(TENSORRT_LLM,)
    ),
    # Sampling.
    _both(
        "max_tokens", "request_output_len", "INT32", _ONE, _SAMPLING, field="max_tokens",
        required_by=(TENSORRT_LLM,),
    ),
    _same("num_return_sequences", "INT32", _ONE, _SAMPLING, field="n"),
    _both("top_k", "runtime_top_k", "INT32", _ONE, _SAMPLING, field="top_k"),
    _both("top_p", "runtime_top_p", "FP32", _ONE, _SAMPLING, field="top_p"),
    _same("min_p", "FP32", _ONE, _SAMPLING, field="min_p"),
    _same("temperature", "FP32", _ONE, _SAMPLING, field="temperature"),
    _same("repetition_penalty", "FP32", _ONE, _SAMPLING, field="repetition_penalty"),
    _same("presence_penalty", "FP32", _ONE, _SAMPLING, field="presence_penalty"),
    _same("frequency_penalty", "FP32", _ONE, _SAMPLING, field="frequency_penalty"),
    _same("min_tokens", "INT32", _ONE, _SAMPLING, field="min_tokens"),
    _same("min_length", "INT32", _ONE, _SAMPLING, field="min_tokens"),
    _same("seed", "UINT64", _ONE, _SAMPLING, field="seed"),
    _same("random_seed", "UINT64", _ONE, _SAMPLING, field="seed"),
    _same("end_id", "INT32", _ONE, _SAMPLING, field="end_id"),
    _same("ignore_eos", "BOOL", _ONE, _SAMPLING, field="ignore_eos"),
    _text("stop_words", "STRING", _MANY, _SAMPLING, field="stop"),
    _text("bad_words", "STRING", _MANY, _SAMPLING, field="bad_words"),
    _tokens("stop_words_list", "INT32", (2, -1), _REQUEST, field="stop_token_ids"),
    _tokens("bad_words_list", "INT32", (2, -1), _REQUEST, field="bad_token_ids"),
    _same("return_log_probs", "BOOL", _ONE, _SAMPLING, field="return_log_probs"),
    _same("return_generation_logits", "BOOL", _ONE, _SAMPLING, field="return_generation_logits"),
    # The second step of an ensemble brings this alone (`tickets`).
    InputSpec(TICKET, "UINT64", _ONE, _OPTION, field="ticket"),
    # Which tier, and when.
    _same("tier", "STRING", _ONE, _REQUEST, field="tier"),
    _same("min_tier", "STRING", _ONE, _REQUEST, field="min_tier"),
    _same("max_tier", "STRING", _ONE, _REQUEST, field="max_tier"),
    _same("tier_policy", "STRING", _ONE, _REQUEST, field="tier_policy"),
    _same("cascade_threshold", "FP32", _ONE, _REQUEST, field="cascade_threshold"),
    _same("switch_tier", "STRING", _ONE, _OPTION, field="switch_tier"),  # for a running request
    _same("draft_tier", "STRING", _MANY, _REQUEST, field="draft_tiers"),
    _same("num_speculative_tokens", "INT32", _ONE, _REQUEST, field="num_speculative_tokens"),
    _same("reuse_prefix", "BOOL", _ONE, _REQUEST, field="reuse_prefix"),
    _same("cache_salt", "STRING", _ONE, _REQUEST, field="cache_salt"),
    _same("priority", "INT32", _ONE, _REQUEST, field="priority"),
    _same("deadline_ms", "INT32", _ONE, _OPTION, field="deadline_ms"),
    # How the answer comes.
    _both("stream", "streaming", "BOOL", _ONE, _OPTION, field="is_streaming"),
    _same("stop", "BOOL", _ONE, _OPTION, field="stop"),
    _same("exclude_input_in_output", "BOOL", _ONE, _OPTION, field="excludes_input"),
    _same("return_perf_metrics", "BOOL", _ONE, _OPTION, field="wants_perf_metrics"),
    _same("return_num_input_tokens", "BOOL", _ONE, _OPTION, field="wants_num_input_tokens"),
    _same("return_num_output_tokens", "BOOL", _ONE, _OPTION, field="wants_num_output_tokens"),
    # Accepted: nothing can depend on them.
    _same("pad_id", "INT32", _ONE, _NO_EFFECT, reason="no output is padded with token ids"),
    _both("length_penalty", "len_penalty", "FP32", _ONE, _NO_EFFECT, reason=_BEAMS_ONLY),
    _tokens("early_stopping", "BOOL", _ONE, _NO_EFFECT, reason=_BEAMS_ONLY),
    _tokens("beam_search_diversity_rate", "FP32", _ONE, _NO_EFFECT, reason=_BEAMS_ONLY),
    _tokens("runtime_top_p_min", "FP32", _ONE, _NO_EFFECT, reason=_ONLY_WITH_DECAY),
    _tokens("runtime_top_p_reset_ids", "INT32", _ONE, _NO_EFFECT, reason=_ONLY_WITH_DECAY),
    # Refused by name unless the value asks for nothing.
    _same("beam_width", "INT32", _ONE, _REFUSED, neutral=(1,), reason="beam search is not served"),
    _same(
        "return_context_logits", "BOOL", _ONE, _REFUSED, neutral=(False,),
        reason="logits of prompt tokens are not returned",
    ),
    _tokens("runtime_top_p_decay", "FP32", _ONE, _REFUSED, neutral=(1.0,), reason=_NO_DECAY),
    _text("decoder_text_input", "STRING", _ONE, _REFUSED, neutral=("",), reason=_NO_ENCODER),
    _tokens("decoder_input_ids", "INT32", _MANY, _REFUSED, reason=_NO_ENCODER),
    _tokens("decoder_input_lengths", "INT32", _ONE, _REFUSED, neutral=(0,), reason=_NO_ENCODER),
    _tokens("encoder_input_features", "FP16", _ROWS, _REFUSED, reason=_NO_ENCODER),
    _tokens("encoder_output_lengths", "INT32", _ONE, _REFUSED, neutral=(0,), reason=_NO_ENCODER),
    _tokens("cross_attention_mask", "BOOL", _ROWS, _REFUSED, reason=_NO_ENCODER),
    _tokens("skip_cross_attn_blocks", "BOOL", _ONE, _REFUSED, reason=_NO_ENCODER),
    _tokens("mrope_rotary_cos_sin", "FP32", _MANY, _REFUSED, reason="images are not served"),
    _tokens("mrope_position_deltas", "INT64", _ONE, _REFUSED, reason="images are not served"),
    _tokens("context_phase_params", "UINT8", _MANY, _REFUSED, reason="prefill runs here"),
    _same("prompt_embedding_table", "FP16", _ROWS, _REFUSED, reason=_NO_PROMPT_TABLE),
    _text("prompt_table_extra_id", "UINT64", _ONE, _REFUSED, neutral=(0,), reason=_NO_PROMPT_TABLE),
    _tokens("prompt_table_extra_ids", "UINT64", _MANY, _REFUSED, reason=_NO_PROMPT_TABLE),
    _same("prompt_vocab_size", "INT32", _ONE, _REFUSED, neutral=(0,), reason=_NO_PROMPT_TABLE),
    _text("embedding_bias_words", "STRING", _MANY, _REFUSED, neutral=("",), reason=_NO_BIAS),
    _text("embedding_bias_weights", "FP32", _MANY, _REFUSED, neutral=(0.0,), reason=_NO_BIAS),
    _tokens("embedding_bias", "FP32", _MANY, _REFUSED, neutral=(0.0,), reason=_NO_BIAS),
    _same("lora_task_id", "UINT64", _ONE, _REFUSED, reason=_NO_LORA),
    _same("lora_weights", "FP16", _ROWS, _REFUSED, reason=_NO_LORA),
    _same("lora_config", "INT32", (-1, 3), _REFUSED, reason=_NO_LORA),
    _same(
        "guided_decoding_guide_type", "STRING", _ONE, _REFUSED, neutral=("",), reason=_NO_GUIDE
    ),
    _same("guided_decoding_guide", "STRING", _ONE, _REFUSED, neutral=("",), reason=_NO_GUIDE),
    _tokens("draft_input_ids", "INT32", _MANY, _REFUSED, reason=_NO_DRAFT_MODEL),
    _tokens("draft_logits", "FP32", _ROWS, _REFUSED, reason=_NO_DRAFT_MODEL),
    _tokens("draft_acceptance_threshold", "FP32", _ONE, _REFUSED, reason=_NO_DRAFT_MODEL),
    InputSpec(
        "num_draft_tokens", "INT32", _ONE, _REFUSED, bls="num_draft_tokens", neutral=(0,),
        reason=_NO_DRAFT_MODEL,
    ),
    InputSpec(
        "use_draft_logits", "BOOL", _ONE, _REFUSED, bls="use_draft_logits", neutral=(False,),
        reason=_NO_DRAFT_MODEL,
    ),
    _tokens("lookahead_window_size", "INT32", _ONE, _REFUSED, neutral=(0,), reason=_NO_LOOKAHEAD),
    _tokens("lookahead_ngram_size", "INT32", _ONE, _REFUSED, neutral=(0,), reason=_NO_LOOKAHEAD),
    _tokens(
        "lookahead_verification_set_size", "INT32", _ONE, _REFUSED, neutral=(0,),
        reason=_NO_LOOKAHEAD,
    ),
    _tokens("retention_token_range_starts", "INT32", _MANY, _REFUSED, reason=_NO_RETENTION),
    _tokens("retention_token_range_ends", "INT32", _MANY, _REFUSED, reason=_NO_RETENTION),
    _tokens("retention_token_range_priorities", "INT32", _MANY, _REFUSED, reason=_NO_RETENTION),
    _tokens("retention_token_range_durations_ms", "INT32", _MANY, _REFUSED, reason=_NO_RETENTION),
    _tokens("retention_decode_priority", "INT32", _ONE, _REFUSED, reason=_NO_RETENTION),
    _tokens("retention_decode_duration_ms", "INT32", _ONE, _REFUSED, reason=_NO_RETENTION),
)
# fmt: on

_TEXT_MODELS = (WORKER, ENSEMBLE, BLS)
_TOKEN_MODELS = (WORKER, TENSORRT_LLM)

OUTPUTS: tuple[OutputSpec, ...] = (
    OutputSpec("text_output", "STRING", _MANY, _TEXT_MODELS),
    OutputSpec("output_ids", "INT32", _ROWS, _TOKEN_MODELS),
    OutputSpec("sequence_length", "INT32", _MANY, _TOKEN_MODELS),
    OutputSpec("cum_log_probs", "FP32", _MANY),
    OutputSpec("output_log_probs", "FP32", _ROWS),
    OutputSpec("context_logits", "FP32", _ROWS),
    OutputSpec("generation_logits", "FP32", (-1, -1, -1)),
    OutputSpec("batch_index", "INT32", _ONE),
    OutputSpec("sequence_index", "INT32", _ONE),
    OutputSpec("kv_cache_alloc_new_blocks", "INT32", _ONE),
    OutputSpec("kv_cache_reused_blocks", "INT32", _ONE),
    OutputSpec("kv_cache_alloc_total_blocks", "INT32", _ONE),
    OutputSpec("arrival_time_ns", "INT64", _ONE),
    OutputSpec("first_scheduled_time_ns", "INT64", _ONE),
    OutputSpec("first_token_time_ns", "INT64", _ONE),
    OutputSpec("last_token_time_ns", "INT64", _ONE),
    OutputSpec("acceptance_rate", "FP32", _ONE),
    OutputSpec("total_accepted_draft_tokens", "INT32", _ONE),
    OutputSpec("total_draft_tokens", "INT32", _ONE),
    OutputSpec("num_input_tokens", "INT32", _ONE),
    OutputSpec("num_output_tokens", "INT32", _ONE),
    OutputSpec("tier_used", "STRING", _ONE),
    OutputSpec("finish_reason", "STRING", _ONE),
    OutputSpec(TICKET, "UINT64", _ONE, (WORKER,)),
)
