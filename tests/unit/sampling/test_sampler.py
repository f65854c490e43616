"""Sampler: one token per row, by the row's own parameters, seed and history."""

from dataclasses import replace
from math import isnan

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from mfs_trt.errors import MfsError
from mfs_trt.sampling import (
    InvalidLogitsError,
    SamplingRow,
    draw_uniform,
    filtered_distribution,
    sample,
)
from mfs_trt.sampling_params import SamplingParams

VOCAB_SIZE = 97
GREEDY = SamplingParams()
PARAMS = (
    GREEDY,
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=1.3, top_k=7),
    SamplingParams(top_p=0.8),
    SamplingParams(min_p=0.1, temperature=2.0),
    SamplingParams(top_k=20, top_p=0.9, min_p=0.05, repetition_penalty=1.2),
    SamplingParams(repetition_penalty=1.5, presence_penalty=0.5),
    SamplingParams(temperature=1.0, frequency_penalty=1.0, min_tokens=5, return_log_probs=True),
)


def row_of(params: SamplingParams = GREEDY, **fields) -> SamplingRow:
    defaults = {"seed": 0, "prompt_token_ids": (1, 2), "output_token_ids": (3, 3)}
    return SamplingRow(params, **{**defaults, **fields})


def logits_of(num_rows: int, seed: int = 0) -> np.ndarray:
    logits = np.random.default_rng(seed).normal(size=(num_rows, VOCAB_SIZE)) * 2
    return logits.astype(np.float32)


def generate(mix_size: int, params: SamplingParams, seed: int) -> list[int]:
    """Ten tokens of one row at a place in a mix of others that changes each step."""
    others = np.random.default_rng(mix_size)
    output: list[int] = []
    for step in range(10):
        logits = logits_of(mix_size + 1, seed=1000 + mix_size * 100 + step)
        place = int(others.integers(mix_size + 1))
        logits[place] = logits_of(1, seed=step)[0]
        rows = [row_of(PARAMS[i % len(PARAMS)], seed=i) for i in range(mix_size + 1)]
        rows[place] = row_of(params, seed=seed, output_token_ids=tuple(output))
        output.append(sample(logits, rows)[place].token_id)
    return output


@pytest.mark.parametrize("params", PARAMS)
def test_row_40_same_seed_gives_the_same_tokens_alone_and_in_any_mix(params):
    alone = generate(0, params, seed=5)
    for mix_size in (1, 3, 12):
        assert generate(mix_size, params, seed=5) == alone


def test_rows_of_one_batch_follow_their_own_parameters():
    """As many rows as parameters, the same logits: each as if it were alone."""
    logits = np.repeat(logits_of(1), len(PARAMS), axis=0)
    rows = [row_of(params, seed=9) for params in PARAMS]
    together = sample(logits, rows)
    alone = [sample(logits[:1], [row])[0] for row in rows]
    assert [s.token_id for s in together] == [s.token_id for s in alone]


def test_different_seeds_and_positions_give_different_draws():
    draws = {draw_uniform(seed, position) for seed in range(50) for position in range(50)}
    assert len(draws) == 2500
    assert all(0 <= draw < 1 for draw in draws)
    assert abs(np.mean(list(draws)) - 0.5) < 0.03  # 5 standard deviations
    draw_uniform(2**64 - 1, 10**6)


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0, top_k=1),
        SamplingParams(temperature=1.0, top_p=0.0),
        SamplingParams(temperature=1.0, top_p=1e-9),
        SamplingParams(temperature=1e-310),
    ],
)
def test_limits_of_sampling_take_the_most_likely_token(params):
    logits = logits_of(30)
    samples = sample(logits, [row_of(params, seed=i) for i in range(30)])
    assert [s.token_id for s in samples] == logits.argmax(axis=1).tolist()


def test_greedy_ties_go_to_the_lowest_id():
    logits = np.array([[0.0, 2.0, 2.0], [1.0, 1.0, 1.0]], dtype=np.float32)
    rows = [row_of(), row_of(SamplingParams(presence_penalty=1.0), output_token_ids=[0])]
    assert [s.token_id for s in sample(logits, rows)] == [1, 1]


def test_given_logits_are_not_changed():
    for dtype in (np.float32, np.float64):
        logits = logits_of(len(PARAMS)).astype(dtype)
        logits.flags.writeable = False
        rows = [row_of(params, bad_token_ids=[[4]], end_token_ids={5}) for params in PARAMS]
        sample(logits, rows)
        for row_logits, row in zip(logits, rows, strict=True):
            filtered_distribution(row_logits, row)


def test_row_15_log_probs_are_of_the_unfiltered_distribution_also_when_greedy():
    logits = logits_of(len(PARAMS))
    rows = [
        row_of(replace(params, return_log_probs=True), bad_token_ids=[[int(logits[i].argmax())]])
        for i, params in enumerate(PARAMS)
    ]
    rows.append(row_of(SamplingParams(top_k=1, return_log_probs=True)))
    logits = np.concatenate((logits, logits[:1]))
    logits += 1000 * np.arange(len(rows), dtype=np.float32)[:, None]
    expected = torch.log_softmax(torch.tensor(logits).double(), dim=-1)
    for i, chosen in enumerate(sample(logits, rows)):
        assert chosen.log_prob == pytest.approx(expected[i, chosen.token_id].item(), abs=1e-12)
        assert chosen.log_prob < -0.01


def test_log_probs_not_asked_for_are_nan():
    samples = sample(logits_of(2), [row_of(), row_of(SamplingParams(return_log_probs=True))])
    assert isnan(samples[0].log_prob)
    assert not isnan(samples[1].log_prob)


@pytest.mark.parametrize("params", PARAMS)
def test_banned_tokens_are_never_chosen(params):
    logits = logits_of(1)
    best_two = np.argsort(logits[0])[-2:].tolist()
    row = row_of(params, bad_token_ids=[best_two[:1], [2, 3, 3, best_two[1]]])
    probs = filtered_distribution(logits[0], row)
    assert probs[best_two].tolist() == [0.0, 0.0]
    chosen = {sample(logits, [replace(row, seed=seed)])[0].token_id for seed in range(50)}
    assert not chosen & set(best_two)


def test_end_tokens_wait_for_min_tokens_also_when_greedy():
    logits = logits_of(1)
    best = int(logits[0].argmax())
    row = row_of(SamplingParams(min_tokens=3), end_token_ids=frozenset({best}))
    assert sample(logits, [row])[0].token_id != best
    longer = replace(row, output_token_ids=(3, 3, 3))
    assert sample(logits, [longer])[0].token_id == best


def test_filtered_distribution_is_that_of_transformers_processors():
    """In the order penalties, temperature, top-k, top-p, min-p, each after the one before."""
    params = SamplingParams(
        temperature=1.7, top_k=30, top_p=0.85, min_p=0.12, repetition_penalty=1.4
    )
    chain = LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(1.4),
            TemperatureLogitsWarper(1.7),
            TopKLogitsWarper(30),
            TopPLogitsWarper(0.85),
            MinPLogitsWarper(0.12),
        ]
    )
    history = torch.tensor([[1, 2, 3, 3]])
    for logits in logits_of(20):
        expected = chain(history, torch.tensor(logits)[None].double()).softmax(dim=-1)[0].numpy()
        probs = filtered_distribution(logits, row_of(params))
        np.testing.assert_allclose(probs, expected, atol=1e-12)
        assert 1 < np.count_nonzero(probs) < 30


def test_filtered_distribution_of_a_greedy_row_is_one_hot():
    logits = logits_of(1)[0]
    probs = filtered_distribution(logits, row_of())
    assert np.flatnonzero(probs).tolist() == [logits.argmax()]
    assert probs.sum() == 1.0


@pytest.mark.parametrize("params", [p for p in PARAMS if not p.is_greedy])
def test_draws_follow_the_filtered_distribution(params):
    """Chi-square of 4000 draws at fixed seeds 0..3999, tokens expected under 5 times pooled.

    With other seeds a correct sampler would fail this with probability 1e-6 (the bound is the
    Wilson-Hilferty approximation of that quantile); with these it passes or fails for good.
    """
    logits = logits_of(1)
    num_draws = 4000
    row = row_of(params)
    probs = filtered_distribution(logits[0], row)
    rows = [replace(row, seed=seed) for seed in range(num_draws)]
    chosen = [s.token_id for s in sample(np.repeat(logits, num_draws, axis=0), rows)]
    observed = np.bincount(chosen, minlength=VOCAB_SIZE)
    assert observed[probs == 0].sum() == 0
    is_rare = probs * num_draws < 5
    expected = np.append(probs[~is_rare], probs[is_rare].sum()) * num_draws
    counted = np.append(observed[~is_rare], observed[is_rare].sum())
    counted, expected = counted[expected > 0], expected[expected > 0]
    statistic = ((counted - expected) ** 2 / expected).sum()
    degrees = len(expected) - 1
    z = 4.7534  # the normal quantile of 1 - 1e-6
    bound = degrees * (1 - 2 / (9 * degrees) + z * (2 / (9 * degrees)) ** 0.5) ** 3
    assert statistic < bound


@pytest.mark.parametrize("draw", [0.0, 1 - 2**-53])
def test_extreme_draws_take_a_token_with_a_chance(draw, monkeypatch):
    monkeypatch.setattr("mfs_trt.sampling.sampler.draw_uniform", lambda *_: draw)
    ends = [0, VOCAB_SIZE - 1]
    row = row_of(SamplingParams(temperature=1.0), bad_token_ids=[[i] for i in ends])
    for logits in logits_of(50):
        assert sample(logits[None], [row])[0].token_id not in ends


@pytest.mark.parametrize("bad_value", [np.nan, np.inf])
def test_row_of_broken_logits_is_named(bad_value):
    logits = logits_of(4)
    logits[2, 50] = bad_value
    with pytest.raises(InvalidLogitsError, match="row 2") as error:
        sample(logits, [row_of()] * 4)
    assert error.value.row == 2
    assert isinstance(error.value, MfsError)


def test_row_without_any_finite_logit_is_named():
    logits = logits_of(2)
    logits[0] = -np.inf
    with pytest.raises(InvalidLogitsError, match="row 0"):
        sample(logits, [row_of()] * 2)
    with pytest.raises(InvalidLogitsError):
        filtered_distribution(logits[0], row_of())


def test_no_rows_give_no_samples():
    assert sample(np.zeros((0, VOCAB_SIZE), dtype=np.float32), []) == []
