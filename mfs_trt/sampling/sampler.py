"""The sampler: logits of a step → one token per row, each row by its own parameters.

Order of operations in a row: logits → log-probabilities → penalties → bans → temperature → top-k →
top-p → min-p → draw. There is no state: randomness is a function of the row's seed and the number
of its output tokens, so a request gets the same tokens alone and in any batch, and again after a
preemption.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import nan

import numpy as np

from mfs_trt.errors import EngineFailedError
from mfs_trt.sampling.filters import min_p_mask, softmax, top_k_mask, top_p_mask
from mfs_trt.sampling.penalties import apply_penalties, ban, banned_token_ids
from mfs_trt.sampling_params import SamplingParams


class InvalidLogitsError(EngineFailedError):
    """A row of logits holds NaN, +inf or nothing finite; `row` is its index in the step."""

    def __init__(self, row: int, value: float) -> None:
        super().__init__(f"logits of row {row}: expected a finite maximum, got {value}")
        self.row = row


@dataclass(frozen=True)
class SamplingRow:
    """All that the choice of one row's next token depends on, next to its logits."""

    params: SamplingParams
    seed: int  # unsigned 64-bit
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    end_token_ids: Collection[int] = ()  # banned until `params.min_tokens`
    bad_token_ids: Sequence[Sequence[int]] = ()

    @property
    def keeps_logits(self) -> bool:
        """Whether neither penalties nor bans can change the logits."""
        return not (
            self.params.has_penalties
            or self.bad_token_ids
            or len(self.output_token_ids) < self.params.min_tokens
        )


@dataclass(frozen=True)
class Sample:
    token_id: int
    log_prob: float  # natural, of the unfiltered distribution; nan unless asked for


def sample(
    logits: np.ndarray,
    rows: Sequence[SamplingRow],
    *,
    token_ids: np.ndarray | None = None,
    top_logits: np.ndarray | None = None,
) -> list[Sample]:
    """Choose a token for each row of logits [n, vocab_size]; the logits are not changed.

    `token_ids` and `top_logits` [n]: each row's most likely token and its logit, where the engine
    has found them; then plain greedy rows leave the logits unread. Greedy ties go to the lowest id,
    or to what the engine found. Raises `InvalidLogitsError`, naming the first row at fault.
    """
    assert len(logits) == len(rows), (logits.shape, len(rows))
    if not rows:
        return []
    token_ids = np.argmax(logits, axis=1) if token_ids is None else token_ids.copy()
    highest = logits[np.arange(len(rows)), token_ids] if top_logits is None else top_logits
    if not np.isfinite(highest).all():
        first = int(np.flatnonzero(~np.isfinite(highest))[0])
        raise InvalidLogitsError(first, float(highest[first]))
    for i, row in enumerate(rows):
        if row.params.is_greedy and row.keeps_logits:
            continue
        scores = _scores(logits[i], row)
        token_ids[i] = scores.argmax() if row.params.is_greedy else _draw(scores, row)
    log_probs = _log_probs(logits, rows, token_ids, highest)
    return [Sample(int(t), float(p)) for t, p in zip(token_ids, log_probs, strict=True)]


def filtered_distribution(logits_row: np.ndarray, row: SamplingRow) -> np.ndarray:
    """What `sample` draws this row's token from: [vocab_size] float64, one-hot when greedy.

    Raises `InvalidLogitsError` (with row 0).
    """
    highest = logits_row.max()
    if not np.isfinite(highest):
        raise InvalidLogitsError(0, float(highest))
    scores = _scores(logits_row, row)
    distribution = np.zeros(len(scores))
    if row.params.is_greedy:
        distribution[scores.argmax()] = 1.0
    else:
        token_ids, probs = _candidates(scores, row.params)
        distribution[token_ids] = probs
    return distribution


def greedy_token(logits_row: np.ndarray, row: SamplingRow) -> int:
    """The row's most likely token after penalties and bans; raises `InvalidLogitsError` (row 0)."""
    token_id = int(logits_row.argmax())
    if not np.isfinite(logits_row[token_id]):
        raise InvalidLogitsError(0, float(logits_row[token_id]))
    return token_id if row.keeps_logits else int(_scores(logits_row, row).argmax())


def log_prob(logits_row: np.ndarray, token_id: int) -> float:
    """Natural logarithm of a token's probability in the unfiltered distribution."""
    shifted = logits_row.astype(np.float64) - logits_row.max()
    return float(shifted[token_id] - np.log(np.exp(shifted).sum()))


def draw_uniform(seed: int, index: int, stream: int = 0) -> float:
    """Number `index` of a seed's stream, in [0, 1); no state is kept.

    In stream 0 the index is the number of tokens before the one that it decides.
    """
    generator = np.random.Philox(key=seed, counter=[index, stream, 0, 0])
    return float(int(generator.random_raw()) >> 11) * 2.0**-53


def _scores(logits_row: np.ndarray, row: SamplingRow) -> np.ndarray:
    """The row's logits after penalties and bans, [vocab_size] float64, a copy."""
    scores = logits_row.astype(np.float64)
    if row.keeps_logits:
        return scores
    history = (row.params, row.prompt_token_ids, row.output_token_ids)
    if row.params.has_penalties:
        apply_penalties(scores, *history)
    banned = banned_token_ids(*history, row.end_token_ids, row.bad_token_ids)
    if banned:
        ban(scores, banned)
    return scores


def _candidates(scores: np.ndarray, params: SamplingParams) -> tuple[np.ndarray, np.ndarray]:
    """Tokens that pass the filters, ascending [m], and their probabilities [m], which sum to 1."""
    if params.temperature is not None:
        with np.errstate(over="ignore"):  # a tiny temperature takes all but the highest to -inf
            scores = (scores - scores.max()) / params.temperature
    token_ids = np.arange(len(scores))
    if params.top_k:
        mask = top_k_mask(scores, params.top_k)
        token_ids, scores = token_ids[mask], scores[mask]
    probs = softmax(scores)
    if params.top_p is not None and params.top_p < 1:
        mask = top_p_mask(probs, params.top_p)
        token_ids, probs = token_ids[mask], probs[mask] / probs[mask].sum()
    if params.min_p:
        mask = min_p_mask(probs, params.min_p)
        token_ids, probs = token_ids[mask], probs[mask] / probs[mask].sum()
    return token_ids, probs


def _draw(scores: np.ndarray, row: SamplingRow) -> int:
    """Inverse of the cumulative distribution at the row's random number."""
    token_ids, probs = _candidates(scores, row.params)
    cumulative = np.cumsum(probs)
    threshold = draw_uniform(row.seed, len(row.output_token_ids)) * cumulative[-1]
    index = np.searchsorted(cumulative, threshold, side="right")
    # The product may round up to the total; the last token with a chance is meant then.
    last = np.searchsorted(cumulative, cumulative[-1], side="left")
    return int(token_ids[min(index, last)])


def _log_probs(
    logits: np.ndarray, rows: Sequence[SamplingRow], token_ids: np.ndarray, highest: np.ndarray
) -> np.ndarray:
    """Log-softmax of the unfiltered logits at the chosen tokens [n]; nan where not asked for."""
    log_probs = np.full(len(rows), nan)
    wanted = np.flatnonzero([row.params.return_log_probs for row in rows])
    if len(wanted):
        shifted = logits[wanted].astype(np.float64) - highest[wanted, None]
        chosen = shifted[np.arange(len(wanted)), token_ids[wanted]]
        log_probs[wanted] = chosen - np.log(np.exp(shifted).sum(axis=1))
    return log_probs
