"""Filters: the tokens that top-k, top-p and min-p leave, as transformers' warpers leave them."""

import numpy as np
import pytest
import torch
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from mfs_trt.sampling.filters import min_p_mask, softmax, top_k_mask, top_p_mask

VOCAB_SIZES = (1, 2, 63, 64, 65, 1000)


def scores_of(vocab_size: int, spread: float, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=vocab_size) * spread


def kept_by(warper, scores: np.ndarray) -> np.ndarray:
    kept = warper(torch.zeros(1, 1, dtype=torch.long), torch.tensor(scores)[None].double())
    return torch.isfinite(kept[0]).numpy()


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@pytest.mark.parametrize("k", [1, 2, 64, 999, 5000])
def test_top_k_keeps_what_transformers_keeps(vocab_size, k):
    scores = scores_of(vocab_size, spread=3)
    np.testing.assert_array_equal(top_k_mask(scores, k), kept_by(TopKLogitsWarper(k), scores))


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@pytest.mark.parametrize("spread", [0.01, 1, 10])
@pytest.mark.parametrize("p", [1e-6, 0.1, 0.5, 0.9, 0.999])
def test_top_p_keeps_what_transformers_keeps(vocab_size, spread, p):
    scores = scores_of(vocab_size, spread)
    expected = kept_by(TopPLogitsWarper(p), scores)
    np.testing.assert_array_equal(top_p_mask(softmax(scores), p), expected)


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@pytest.mark.parametrize("min_p", [0.0, 0.01, 0.3, 1.0])
def test_min_p_keeps_what_transformers_keeps(vocab_size, min_p):
    scores = scores_of(vocab_size, spread=2)
    expected = kept_by(MinPLogitsWarper(min_p), scores)
    np.testing.assert_array_equal(min_p_mask(softmax(scores), min_p), expected)


def test_top_k_keeps_tokens_equal_to_the_kth():
    assert top_k_mask(np.array([1.0, 3.0, 2.0, 2.0]), 2).tolist() == [False, True, True, True]


def test_nucleus_among_equals_takes_the_lowest_ids():
    """200 equal tokens: more than one head is tried, and half of them reach a half."""
    mask = top_p_mask(np.full(256, 1 / 256), 0.5)
    assert np.flatnonzero(mask).tolist() == list(range(128))


def test_nucleus_of_zero_is_the_most_likely_token():
    assert top_p_mask(np.array([0.2, 0.5, 0.3]), 0.0).tolist() == [False, True, False]


def test_softmax_of_huge_and_banned_scores_is_a_distribution():
    probs = softmax(np.array([1e300, 1e300, -np.inf, -1e300]))
    assert probs.tolist() == [0.5, 0.5, 0.0, 0.0]
