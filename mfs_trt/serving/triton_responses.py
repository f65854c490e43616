"""What a Triton response carries: `OutputChunk` → arrays of the outputs that were asked for.

Pure and in numpy. Shapes are [1, *dims]: a response belongs to one sequence of one row.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mfs_trt.request import FinishReason
from mfs_trt.serving.triton_requests import ParsedRow, ResponseOptions


@dataclass(frozen=True)
class OutputChunk:
    """One response for one sequence: what is new in it, and how the sequence stands after it."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    logits: np.ndarray | None = None  # [len(token_ids), vocab_size] float32
    num_new_tokens: int = 0  # generated ones; `token_ids` may start with the prompt's
    cumulative_log_prob: float = 0.0
    num_prompt_tokens: int = 0
    tier: str = ""
    finish_reason: FinishReason | None = None
    arrival_time_ns: int = 0
    first_scheduled_time_ns: int = 0
    first_token_time_ns: int = 0
    last_token_time_ns: int = 0
    num_kv_blocks: int = 0  # held, over all segments
    num_reused_blocks: int = 0  # of them, got from the prefix cache
    num_draft_tokens: int = 0  # decided on so far, over all levels
    num_accepted_draft_tokens: int = 0


def build_outputs(
    chunk: OutputChunk,
    options: ResponseOptions,
    batch_index: int,
    sequence_index: int,
    requested: frozenset[str],
) -> dict[str, np.ndarray]:
    """Arrays of one response, for the outputs in `requested` that this request's options ask for.

    Shapes are [1, *dims]: a response belongs to one sequence of one row.
    """
    num = len(chunk.token_ids)
    outputs: dict[str, np.ndarray] = {
        "sequence_index": _int32([sequence_index]),
        "batch_index": _int32([batch_index]),
        "tier_used": _strings([chunk.tier]),
        "finish_reason": _strings([chunk.finish_reason.value if chunk.finish_reason else ""]),
    }
    if "text_output" in requested:
        outputs["text_output"] = _strings([chunk.text])
    if "output_ids" in requested:
        outputs["output_ids"] = np.array(chunk.token_ids, np.int32).reshape(1, 1, num)
    if "sequence_length" in requested:
        outputs["sequence_length"] = _int32([num])
    if options.return_log_probs:
        outputs["output_log_probs"] = np.array(chunk.log_probs, np.float32).reshape(1, 1, -1)
        outputs["cum_log_probs"] = np.array([[chunk.cumulative_log_prob]], np.float32)
    if options.return_generation_logits:
        logits = np.zeros((0, 0), np.float32) if chunk.logits is None else chunk.logits
        outputs["generation_logits"] = np.asarray(logits, np.float32)[None, None]
    if options.wants_num_input_tokens:
        outputs["num_input_tokens"] = _int32([chunk.num_prompt_tokens])
    if options.wants_num_output_tokens:
        outputs["num_output_tokens"] = _int32([chunk.num_new_tokens])
    if options.wants_perf_metrics:
        outputs |= _perf_outputs(chunk)
    return {name: array for name, array in outputs.items() if name in requested}


def echo_prompt(
    chunk: OutputChunk, parsed: ParsedRow, requested: frozenset[str], tokenizer: Any
) -> OutputChunk:
    """`chunk` with the prompt before it, if this answer carries the prompt.

    Streamed answers never do, nor do those to chat `messages`. `tokenizer` is asked only for what
    is `requested`; without one there is no text.
    """
    prompt, options = parsed.prompt, parsed.options
    if options.is_streaming or options.excludes_input or prompt.messages is not None:
        return chunk
    text, token_ids = prompt.prompt, prompt.token_ids
    if text is None:
        wants_text = tokenizer is not None and "text_output" in requested
        text = tokenizer.decode(list(token_ids or ())) if wants_text else ""
    if tokenizer is None:
        return replace(chunk, text=text + chunk.text, token_ids=(*token_ids, *chunk.token_ids))
    wanted = {"text_output", "output_ids"} & requested
    if token_ids is None:
        token_ids = tokenizer.encode(text) if wanted else ()
    between = _lost_between(tokenizer, token_ids, chunk.token_ids) if wanted else ""
    return replace(
        chunk,
        text=text + between + chunk.text,
        token_ids=(*token_ids, *chunk.token_ids),
    )


def _lost_between(tokenizer: Any, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> str:
    """What decoding prompt and output apart loses between them: SentencePiece's space."""
    prompt, output = tokenizer.decode(list(prompt_ids)), tokenizer.decode(list(output_ids))
    whole = tokenizer.decode([*prompt_ids, *output_ids])
    if not (output and whole.startswith(prompt) and whole.endswith(output)):
        return ""
    return whole[len(prompt) : len(whole) - len(output)]


def _perf_outputs(chunk: OutputChunk) -> dict[str, np.ndarray]:
    times = {
        "arrival_time_ns": chunk.arrival_time_ns,
        "first_scheduled_time_ns": chunk.first_scheduled_time_ns,
        "first_token_time_ns": chunk.first_token_time_ns,
        "last_token_time_ns": chunk.last_token_time_ns,
    }
    counts = {
        "kv_cache_alloc_new_blocks": max(0, chunk.num_kv_blocks - chunk.num_reused_blocks),
        "kv_cache_reused_blocks": chunk.num_reused_blocks,
        "kv_cache_alloc_total_blocks": chunk.num_kv_blocks,
        "total_accepted_draft_tokens": chunk.num_accepted_draft_tokens,
        "total_draft_tokens": chunk.num_draft_tokens,
    }
    rate = chunk.num_accepted_draft_tokens / max(1, chunk.num_draft_tokens)
    return {
        **{name: np.array([[value]], np.int64) for name, value in times.items()},
        **{name: _int32([value]) for name, value in counts.items()},
        "acceptance_rate": np.array([[rate]], np.float32),
    }


def _int32(values: list[int]) -> np.ndarray:
    return np.array([values], np.int32)


def _strings(values: list[str]) -> np.ndarray:
    return np.array([[value.encode() for value in values]], dtype=np.object_)
