"""Penalties and bans: what a row's history does to its scores."""

import numpy as np
import pytest
import torch
from transformers import NoBadWordsLogitsProcessor, RepetitionPenaltyLogitsProcessor

from mfs_trt.sampling.penalties import apply_penalties, ban, banned_token_ids
from mfs_trt.sampling_params import SamplingParams

SCORES = np.random.default_rng(0).normal(size=20) * 4


@pytest.mark.parametrize("penalty", [0.7, 1.3, 2.0])
@pytest.mark.parametrize("prompt,output", [((3, 4, 4), (4, 5, 3)), ((), (7,)), ((8, 8), ())])
def test_repetition_penalty_is_that_of_transformers(penalty, prompt, output):
    scores = SCORES.copy()
    apply_penalties(scores, SamplingParams(repetition_penalty=penalty), prompt, output)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(
        torch.tensor([[*prompt, *output]]), torch.tensor(SCORES)[None]
    )
    np.testing.assert_allclose(scores, expected[0].numpy(), rtol=1e-12)


def test_presence_and_frequency_penalties_count_the_output_only():
    scores = SCORES.copy()
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    apply_penalties(scores, params, prompt_token_ids=[1, 2], output_token_ids=[2, 3, 3])
    lowered = SCORES - scores
    assert np.flatnonzero(lowered).tolist() == [2, 3]
    assert lowered[2] == pytest.approx(0.75)
    assert lowered[3] == pytest.approx(1.0)


def test_token_ids_outside_the_vocabulary_are_ignored():
    scores = SCORES.copy()
    params = SamplingParams(repetition_penalty=2.0, presence_penalty=1.0)
    apply_penalties(scores, params, prompt_token_ids=[20, -1], output_token_ids=[99])
    ban(scores, [20, -1, 99])
    np.testing.assert_array_equal(scores, SCORES)


@pytest.mark.parametrize("prompt_length", range(6))
def test_bad_words_ban_what_transformers_bans(prompt_length):
    token_ids = [5, 1, 2, 1, 2]
    words = [[9], [2, 8], [1, 2, 7], [2, 1, 2, 6], [3, 2, 4], [1, 1], [0, 5, 1, 2, 1, 2, 3], [8, 2]]
    banned = banned_token_ids(
        SamplingParams(), token_ids[:prompt_length], token_ids[prompt_length:], (), words
    )
    expected = NoBadWordsLogitsProcessor(words, eos_token_id=[15])(
        torch.tensor([token_ids]), torch.zeros(1, 20)
    )
    assert sorted(banned) == torch.isinf(expected[0]).nonzero()[:, 0].tolist() == [6, 7, 8, 9]


@pytest.mark.parametrize("num_output,is_banned", [(0, True), (2, True), (3, False), (4, False)])
def test_end_tokens_are_banned_until_min_tokens(num_output, is_banned):
    output = [1] * num_output
    banned = banned_token_ids(SamplingParams(min_tokens=3), [2], output, {15, 16}, ())
    assert sorted(banned) == ([15, 16] if is_banned else [])


def test_bans_that_leave_no_token_are_not_applied():
    scores = np.array([1.0, -np.inf, 2.0])
    ban(scores, [0, 2, 2])
    assert scores.tolist() == [1.0, -np.inf, 2.0]
