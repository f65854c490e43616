"""What a step's logits decide: a token, a draft, or which drafts stand."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from mfs_trt.engine.interface import StepOutput
from mfs_trt.request import Request
from mfs_trt.sampling.sampler import Sample, SamplingRow, draw_uniform, log_prob, sample
from mfs_trt.sampling.speculative import verify
from mfs_trt.scheduler.output import SchedulerOutput


@dataclass(frozen=True)
class Decision:
    """Tokens that follow those which stand at `level` of a request."""

    request: Request
    level: int
    token_ids: tuple[int, ...]
    probs: tuple[np.ndarray | None, ...]  # what each was drawn from, kept while it is a draft
    log_probs: tuple[float, ...]  # where the request asked for them
    logits: np.ndarray  # [len(token_ids), vocab_size], the engine's own memory

    @property
    def is_final(self) -> bool:
        return self.level == len(self.request.num_accepted) - 1


def decide(
    output: SchedulerOutput, step_output: StepOutput, requests: dict[str, Request]
) -> list[Decision]:
    """Decisions in the order of the exits, shallow tiers first."""
    decisions: list[Decision] = []
    for s, ids in enumerate(output.sampled):
        logits, items = step_output.logits[s], output.segments[s]
        if logits is None or items is None:
            continue
        found = [requests[request_id] for request_id in ids]
        levels = [output.levels[request_id] for request_id in ids]
        starts = np.concatenate(([0], np.cumsum(items.exit_counts)))
        plain = [i for i, request in enumerate(found) if _is_plain(request, levels[i])]
        samples = _sample_plain(step_output, s, starts[plain], [found[i] for i in plain])
        by_index: dict[int, Sample] = dict(zip(plain, samples, strict=True))
        for i, request in enumerate(found):
            rows = logits[starts[i] : starts[i + 1]]
            if i in by_index:
                one = by_index[i]
                log_probs = (one.log_prob,) if request.params.return_log_probs else ()
                decisions.append(
                    Decision(request, levels[i], (one.token_id,), (None,), log_probs, rows)
                )
            else:
                decisions.append(_decide_on_drafts(request, levels[i], rows))
    return decisions


def _is_plain(request: Request, level: int) -> bool:
    """Whether one final token is sampled, with no draft to decide on."""
    return level == len(request.num_accepted) - 1 and request.num_tokens == request.num_final_tokens


def _sample_plain(
    output: StepOutput, s: int, rows: np.ndarray, requests: Sequence[Request]
) -> list[Sample]:
    logits, token_ids, top_logits = output.logits[s], output.token_ids[s], output.top_logits[s]
    assert logits is not None and token_ids is not None and top_logits is not None
    if len(rows) < len(logits):
        logits, token_ids, top_logits = logits[rows], token_ids[rows], top_logits[rows]
    sampling_rows = [sampling_row(r, r.output_token_ids) for r in requests]
    return sample(logits, sampling_rows, token_ids=token_ids, top_logits=top_logits)


def _decide_on_drafts(request: Request, level: int, logits: np.ndarray) -> Decision:
    start = request.num_accepted[level]
    final = request.num_final_tokens
    known = request.token_ids[request.num_prompt_tokens : start]
    verdict = verify(
        logits,
        sampling_row(request, known),
        request.token_ids[start:],
        request.draft_probs[start - final :],
        partial(_next_uniform, request),
    )
    rows = logits[: len(verdict.token_ids)]
    log_probs: tuple[float, ...] = ()
    if request.params.return_log_probs:
        pairs = zip(rows, verdict.token_ids, strict=True)
        log_probs = tuple(log_prob(row, token) for row, token in pairs)
    return Decision(request, level, verdict.token_ids, verdict.probs, log_probs, rows)


def _next_uniform(request: Request) -> float:
    """Numbers of a stream of its own: plain sampling counts tokens, speculation counts draws."""
    request.num_draws += 1
    return draw_uniform(request.seed, request.num_draws, stream=1)


def sampling_row(request: Request, output_token_ids: Sequence[int]) -> SamplingRow:
    return SamplingRow(
        params=request.params,
        seed=request.seed,
        prompt_token_ids=request.prompt_token_ids,
        output_token_ids=output_token_ids,
        end_token_ids=request.end_token_ids,
        bad_token_ids=request.bad_token_ids,
    )


def cut(decision: Decision, num_tokens: int) -> Decision:
    """The first tokens of a decision: what comes behind them is not wanted."""
    return replace(
        decision,
        token_ids=decision.token_ids[:num_tokens],
        probs=decision.probs[:num_tokens],
        log_probs=decision.log_probs[:num_tokens],
        logits=decision.logits[:num_tokens],
    )
