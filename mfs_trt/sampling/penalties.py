"""What a row's history does to its scores: penalties on tokens seen, bans on tokens to come.

Scores are logits on their way to a distribution: [vocab_size] float64, owned by the caller of these
functions and changed in place. Token ids outside the vocabulary are ignored.
"""

from collections.abc import Collection, Sequence

import numpy as np

from mfs_trt.sampling_params import SamplingParams


def apply_penalties(
    scores: np.ndarray,
    params: SamplingParams,
    prompt_token_ids: Sequence[int],
    output_token_ids: Sequence[int],
) -> None:
    """Lower the scores of tokens seen before.

    The repetition penalty divides positive and multiplies negative scores of every token of prompt
    and output, once however often it occurs. Presence and frequency penalties are subtracted for
    tokens of the output, the first once, the second per occurrence.
    """
    output = _in_vocabulary(output_token_ids, scores)
    if params.repetition_penalty != 1.0:
        seen = np.concatenate((_in_vocabulary(prompt_token_ids, scores), output))
        before = scores[seen]  # a copy, so a token that occurs twice is still penalised once
        penalty = params.repetition_penalty
        scores[seen] = np.where(before < 0, before * penalty, before / penalty)
    if params.presence_penalty or params.frequency_penalty:
        tokens, counts = np.unique(output, return_counts=True)
        scores[tokens] -= params.presence_penalty + params.frequency_penalty * counts


def banned_token_ids(
    params: SamplingParams,
    prompt_token_ids: Sequence[int],
    output_token_ids: Sequence[int],
    end_token_ids: Collection[int],
    bad_token_ids: Sequence[Sequence[int]],
) -> list[int]:
    """Tokens that may not come next.

    The last token of a bad word is banned where the tail of prompt and output equals the tokens
    before it (a bad word of one token: always); end tokens are banned until the output has
    `min_tokens` tokens.
    """
    banned = []
    if bad_token_ids:
        longest = max(map(len, bad_token_ids)) - 1
        tail = list(output_token_ids[-longest:]) if longest > 0 else []
        if len(tail) < longest:
            tail = list(prompt_token_ids[len(tail) - longest :]) + tail
        for *first, last in bad_token_ids:
            if len(first) <= len(tail) and first == tail[len(tail) - len(first) :]:
                banned.append(last)
    if len(output_token_ids) < params.min_tokens:
        banned.extend(end_token_ids)
    return banned


def ban(scores: np.ndarray, token_ids: Sequence[int]) -> None:
    """Give the tokens no chance. Bans that would leave no token at all are not applied."""
    banned = _in_vocabulary(token_ids, scores)
    before = scores[banned]
    scores[banned] = -np.inf
    if scores.max() == -np.inf:
        scores[banned] = before


def _in_vocabulary(token_ids: Sequence[int], scores: np.ndarray) -> np.ndarray:
    ids = np.asarray(token_ids, dtype=np.int64)
    return ids[(ids >= 0) & (ids < len(scores))]
