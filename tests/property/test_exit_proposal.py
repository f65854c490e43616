"""Proposed exits are the best of all that are near enough, whatever the depth and the wishes."""

from itertools import combinations
from math import gcd

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mfs_trt.errors import ConfigError
from mfs_trt.evaluation.proposal import DRAFT_BAND, propose_exits
from mfs_trt.family.tiers import parse_tiers

TOLERANCE = 0.06


def is_near(exits, wanted, num_layers) -> bool:
    """Draft within its band, the others within the tolerance, where a whole layer is."""
    draft, *others = exits
    low, high = (share * num_layers for share in DRAFT_BAND)
    if not low <= draft <= high:
        return False
    return all(
        abs(layer - depth) <= TOLERANCE * num_layers
        for layer, depth in zip(others, sorted(wanted), strict=True)
    )


def distance(exits, wanted, num_layers) -> float:
    centres = [sum(DRAFT_BAND) / 2 * num_layers, *sorted(wanted)]
    return sum(abs(a - b) for a, b in zip(exits, centres, strict=True))


@given(
    num_layers=st.integers(16, 40),
    fractions=st.lists(st.floats(0.4, 0.9), min_size=1, max_size=2),
)
def test_no_near_choice_has_a_larger_layer_group_nor_an_equal_one_nearer(num_layers, fractions):
    wanted = [fraction * num_layers for fraction in fractions]
    near = [
        exits
        for exits in combinations(range(1, num_layers), len(wanted) + 1)
        if is_near(exits, wanted, num_layers)
    ]
    try:
        found = propose_exits(num_layers, wanted, tolerance=TOLERANCE)
    except ConfigError:
        assert near == []
        return
    assert found.exits[-1] == num_layers
    assert found.group_size == gcd(*found.exits)
    assert near == [] or found.exits[:-1] in near
    best = [exits for exits in near if gcd(*exits, num_layers) >= found.group_size]
    if near:
        assert {gcd(*exits, num_layers) for exits in best} == {found.group_size}
        least = min(distance(exits, wanted, num_layers) for exits in best)
        assert distance(found.exits[:-1], wanted, num_layers) == pytest.approx(least)


@given(num_layers=st.integers(2, 130), fraction=st.floats(0.3, 0.99))
def test_a_proposal_is_text_that_the_other_commands_take(num_layers, fraction):
    try:
        found = propose_exits(num_layers, [fraction * num_layers])
    except ConfigError:
        assert num_layers < 12
        return
    tiers = parse_tiers(found.to_tiers(), num_layers)
    assert tuple(tier.exit_layer for tier in tiers) == found.exits
    assert tiers[0].name == "draft"
    assert tiers[0].exit_layer == pytest.approx(0.2 * num_layers, abs=max(1, 0.06 * num_layers))


@given(num_layers=st.integers(2, 130))
def test_without_wishes_there_is_a_draft_and_the_whole(num_layers):
    found = propose_exits(num_layers, [])
    assert len(found.exits) == 2
    assert found.names == ("draft", "tier0")
