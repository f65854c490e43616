"""Accept or reject drafts so that what stands follows the target's own law exactly. Pure.

Speculative sampling (Leviathan et al. 2023, Chen et al. 2023) with the *filtered* distributions of
the request's own parameters: draft d is accepted with probability min(1, p(d) / q(d)); the first
rejected one is replaced by a token of max(p - q, 0), renormalised. Under greedy decoding that is:
the drafts stand up to the first one that is not the target's most likely token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mfs_trt.sampling.sampler import SamplingRow, filtered_distribution, greedy_token

# The next number of the request's random stream, uniform in [0, 1).
NextUniform = Callable[[], float]


@dataclass(frozen=True)
class Verdict:
    """The tokens that stand after a verification: accepted drafts and one of the target's own."""

    token_ids: tuple[int, ...]
    probs: tuple[np.ndarray | None, ...]  # what each was drawn from; None where decoding is greedy

    @property
    def num_accepted(self) -> int:
        return len(self.token_ids) - 1


def draft(logits: np.ndarray, row: SamplingRow, next_uniform: NextUniform) -> Verdict:
    """One token from one row of logits [vocab_size], and the distribution that it is drawn from."""
    return verify(logits[None], row, (), (), next_uniform)


def verify(
    logits: np.ndarray,
    row: SamplingRow,
    draft_token_ids: Sequence[int],
    draft_probs: Sequence[np.ndarray | None],
    next_uniform: NextUniform,
) -> Verdict:
    """Decide on drafts from the target's logits [num_drafts + 1, vocab_size].

    `row`: the request up to the first draft. `draft_probs`: [vocab_size] each, what the drafts were
    drawn from; None under greedy decoding.
    """
    assert len(logits) == len(draft_token_ids) + 1, (len(logits), len(draft_token_ids))
    known = list(row.output_token_ids)
    tokens: list[int] = []
    probs: list[np.ndarray | None] = []
    for i, scores in enumerate(logits):
        at = replace(row, output_token_ids=known + tokens)
        drafted = draft_token_ids[i] if i < len(draft_token_ids) else None
        if row.params.is_greedy:
            token, p = greedy_token(scores, at), None
        else:
            p = filtered_distribution(scores, at)
            q = draft_probs[i] if drafted is not None else None
            token = _decide(p, drafted, q, next_uniform)
        tokens.append(token)
        probs.append(p)
        if token != drafted:
            break
    return Verdict(tuple(tokens), tuple(probs))


def _decide(
    p: np.ndarray, drafted: int | None, q: np.ndarray | None, next_uniform: NextUniform
) -> int:
    if drafted is None:
        return _draw(p, next_uniform())
    assert q is not None and q[drafted] > 0, drafted
    if next_uniform() * q[drafted] < p[drafted]:
        return drafted
    rest = np.maximum(p - q, 0.0)
    rest[drafted] = 0.0  # p(d) < q(d) here; rounding must not bring it back
    if not rest.any():  # p equals q up to rounding: whatever is drawn follows p
        return _draw(p, next_uniform())
    return _draw(rest, next_uniform())


def _draw(weights: np.ndarray, uniform: float) -> int:
    cumulative = np.cumsum(weights)
    index = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
    last = int(np.searchsorted(cumulative, cumulative[-1], side="left"))
    return min(index, last)
