"""A request runs at the tier it names, else at the highest that its bounds allow."""

import pytest

from mfs_trt.errors import FamilyError, InvalidRequestError
from mfs_trt.request import PromptRequest
from mfs_trt.scheduler.tier_policy import choose_tier
from tiny import tiny_family

FAMILY = tiny_family((1, 2, 4))  # tiers t0, t1, t2


@pytest.mark.parametrize(
    ("wishes", "tier"),
    [
        ({}, 2),
        ({"tier": "t0"}, 0),
        ({"max_tier": "t1"}, 1),
        ({"min_tier": "t1"}, 2),
        ({"min_tier": "t0", "max_tier": "t0"}, 0),
        ({"tier": "t1", "min_tier": "t1", "max_tier": "t1"}, 1),
    ],
)
def test_tier_is_the_named_one_or_the_highest_within_bounds(wishes, tier):
    assert choose_tier(PromptRequest("r", **wishes), FAMILY) == tier


@pytest.mark.parametrize("field", ["tier", "min_tier", "max_tier"])
def test_unknown_name_is_refused_with_the_known_ones(field):
    with pytest.raises(FamilyError, match="expected one of t0, t1, t2, got 'huge'"):
        choose_tier(PromptRequest("r", **{field: "huge"}), FAMILY)


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        ({"min_tier": "t2", "max_tier": "t0"}, "min_tier: expected at most max_tier 't0'"),
        ({"tier": "t0", "min_tier": "t1"}, "tier: expected one between 't1' and 't2', got 't0'"),
        ({"tier": "t2", "max_tier": "t1"}, "tier: expected one between 't0' and 't1', got 't2'"),
    ],
)
def test_bounds_that_exclude_the_choice_are_refused(wishes, message):
    with pytest.raises(InvalidRequestError, match=message):
        choose_tier(PromptRequest("r", **wishes), FAMILY)
