"""Drafts are as many as pay."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from host_logic import make_request
from mfs_trt.scheduler.drafting import (
    CANDIDATES,
    PROBE_EVERY,
    Acceptance,
    Drafting,
    tokens_per_round,
)
from mfs_trt.scheduler.step_cost import StepCost, StepWork


def make_cost(shallow_ms: float = 1.0, deep_ms: float = 4.0, row_ms: float = 0.02) -> StepCost:
    """Two segments that cost this much to run at all, and each row a little."""
    rng = random.Random(0)
    cost = StepCost((1, 4))
    for _ in range(300):
        rows = [rng.randint(1, 40), rng.choice([0, rng.randint(1, 40)])]
        millis = shallow_ms + (deep_ms if rows[1] else 0) + row_ms * sum(rows)
        cost.observe(StepWork(rows), millis / 1000)
    return cost


def make_speculating(count: int, **fields):
    fields = {"tier": 1, "draft_levels": (0,), **fields}
    return [make_request(f"s{i}", 10, **fields) for i in range(count)]


def chosen(cost: StepCost, share: float, speculating=1, others=(), num_seen=200) -> int:
    """The length after `num_seen` verifications of 4 drafts of which each stands with `share`."""
    drafting = Drafting(cost)
    requests = make_speculating(speculating)
    rng = random.Random(1)
    for i in range(num_seen):
        accepted = 0
        while accepted < 4 and rng.random() < share:
            accepted += 1
        drafting.observe(requests[i % len(requests)], 0, 4, accepted)
    drafting.choose([*requests, *others])
    return drafting.lengths(requests[0])[0]


def test_drafts_that_stand_are_made_and_drafts_that_fall_are_not():
    assert chosen(make_cost(), 0.9) >= 4
    assert chosen(make_cost(), 0.02) == 0


def test_the_better_they_stand_the_longer_they_get():
    lengths = [chosen(make_cost(), share) for share in (0.1, 0.4, 0.7, 0.9, 0.99)]
    assert lengths == sorted(lengths) and lengths[0] < lengths[-1]


def test_a_draft_pass_as_dear_as_a_verification_never_pays():
    assert chosen(make_cost(shallow_ms=5, deep_ms=0), 0.99) == 0


def test_rows_that_are_dear_make_drafts_short():
    assert chosen(make_cost(row_ms=2), 0.8) < chosen(make_cost(row_ms=0.01), 0.8)


def test_beside_a_request_that_needs_every_segment_drafting_does_not_pay():
    deep = make_request("deep", 10, tier=1)
    shallow = make_request("shallow", 10, tier=0)
    assert chosen(make_cost(), 0.9, others=[deep]) == 0
    assert chosen(make_cost(), 0.9, others=[shallow]) >= 4


def test_what_is_chosen_is_the_best_of_the_candidates_by_the_formula():
    cost, share = make_cost(), 0.8

    def rate(length: int) -> float:
        passes = length * 1.02 + (5 + 0.02 * (length + 2) if length else 5.04)
        return tokens_per_round(share, length) / passes

    best = max((0, *CANDIDATES), key=rate)
    assert rate(chosen(cost, share, num_seen=2000)) >= 0.97 * rate(best)


def test_where_drafting_does_not_pay_one_draft_is_tried_now_and_then_and_ever_more_seldom():
    drafting = Drafting(make_cost(shallow_ms=5, deep_ms=0))
    (request,) = make_speculating(1)
    tried = []
    for step in range(8 * PROBE_EVERY):
        drafting.choose([request])
        (length,) = drafting.lengths(request)
        assert length in (0, 1)
        if length:
            tried.append(step)
    gaps = [b - a for a, b in itertools.pairwise([-1, *tried])]
    assert gaps == [PROBE_EVERY, 2 * PROBE_EVERY + 1, 4 * PROBE_EVERY + 1]


def test_every_level_of_a_chain_gets_a_length():
    cost = StepCost((1, 1, 6))
    rng = random.Random(0)
    for _ in range(300):
        depth = rng.randint(0, 2)
        rows = [rng.randint(1, 20) if s <= depth else 0 for s in range(3)]
        cost.observe(StepWork(rows), 1e-3 * sum((1, 1, 6)[: depth + 1]) + 1e-5 * sum(rows))
    (request,) = make_speculating(1, tier=2, draft_levels=(0, 1))
    drafting = Drafting(cost)
    for _ in range(50):
        drafting.observe(request, 0, 4, 4)
        drafting.observe(request, 1, 4, 4)
    drafting.choose([request])
    assert min(drafting.lengths(request)) > 0


def test_a_new_request_starts_from_what_others_found():
    drafting = Drafting(make_cost())
    known, new = make_speculating(2)
    for _ in range(100):
        drafting.observe(known, 0, 4, 0)
    drafting.forget(known)
    drafting.choose([new])
    assert drafting.lengths(new) == (0,)


@given(st.floats(0, 0.999), st.integers(0, 20))
def test_tokens_per_round_is_the_sum_of_what_each_draft_adds(acceptance, num_drafts):
    expected = sum(acceptance**i for i in range(num_drafts + 1))
    assert tokens_per_round(acceptance, num_drafts) == pytest.approx(expected)


@settings(deadline=None, max_examples=20)
@given(st.floats(0.05, 0.95))
def test_acceptance_is_estimated_from_the_drafts_that_were_looked_at(share):
    rng = random.Random(0)
    found = Acceptance()
    estimates = []
    for _ in range(3000):
        accepted = 0
        while accepted < 4 and rng.random() < share:
            accepted += 1
        found.observe(4, accepted)
        estimates.append(found.estimate(0.5))
    assert sum(estimates[200:]) / len(estimates[200:]) == pytest.approx(share, abs=0.08)
