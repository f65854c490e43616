"""Filters that cut a distribution's tail: top-k, top-p, min-p, each a mask of the tokens that stay.

Ties are settled by value or by token id, so that no filter depends on how a sort orders equals.
"""

import numpy as np

_FIRST_NUCLEUS_SIZE = 64  # tokens sorted at first when looking for a nucleus


def softmax(scores: np.ndarray) -> np.ndarray:
    """Probabilities [n] float64 of scores [n], of which at least one is finite."""
    exponentials = np.exp(scores - scores.max())
    return exponentials / exponentials.sum()


def top_k_mask(scores: np.ndarray, k: int) -> np.ndarray:
    """The k highest of scores [n], and those equal to the k-th. k >= 1."""
    if k >= len(scores):
        return np.ones(len(scores), dtype=bool)
    return scores >= np.partition(scores, len(scores) - k)[len(scores) - k]


def top_p_mask(probs: np.ndarray, p: float) -> np.ndarray:
    """The fewest most likely of probs [n] whose sum reaches p, at least one.

    Among equals the lower ids stay. Only as many tokens are sorted as the nucleus needs, by trying
    larger and larger heads.
    """
    size = min(_FIRST_NUCLEUS_SIZE, len(probs))
    while True:
        head = np.flatnonzero(top_k_mask(probs, size))
        if size == len(probs) or probs[head].sum() >= p:
            break
        size = min(size * 8, len(probs))
    order = head[np.argsort(-probs[head], kind="stable")]
    mass_before = np.concatenate(([0.0], np.cumsum(probs[order])[:-1]))
    mask = np.zeros(len(probs), dtype=bool)
    mask[order[mass_before < p]] = True
    mask[order[0]] = True
    return mask


def min_p_mask(probs: np.ndarray, min_p: float) -> np.ndarray:
    """Those of probs [n] that are at least `min_p` times the highest."""
    return probs >= min_p * probs.max()
