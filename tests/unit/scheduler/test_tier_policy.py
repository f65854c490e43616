"""What a request asks about its tier: where it starts, what may move it, between which bounds."""

import pytest

from mfs_trt.errors import FamilyError, InvalidRequestError
from mfs_trt.request import PromptRequest
from mfs_trt.scheduler.tier_policy import CASCADE_THRESHOLD, choose_policy
from tiny import tiny_family

FAMILY = tiny_family((1, 2, 4))  # tiers t0, t1, t2; t0 has a quarter of the layers
SOON = {"deadline_s": 1.0}


@pytest.mark.parametrize(
    ("wishes", "tier"),
    [
        ({}, 2),
        ({"tier": "t0"}, 0),
        ({"max_tier": "t1"}, 1),
        ({"min_tier": "t1"}, 2),
        ({"min_tier": "t0", "max_tier": "t0"}, 0),
        ({"tier": "t1", "min_tier": "t1", "max_tier": "t1"}, 1),
        ({"tier_policy": "load", "max_tier": "t1"}, 1),
        ({"tier_policy": "deadline", **SOON}, 2),
        ({"tier_policy": "cascade", "min_tier": "t0"}, 0),
        ({"tier_policy": "cascade", "min_tier": "t0", "tier": "t1"}, 1),
    ],
)
def test_a_request_starts_at_the_named_tier_else_highest_and_a_cascade_lowest(wishes, tier):
    assert choose_policy(PromptRequest("r", **wishes), FAMILY).start == tier


@pytest.mark.parametrize(
    ("wishes", "bounds"),
    [
        ({}, (1, 2)),
        ({"min_tier": "t0"}, (0, 2)),
        ({"tier": "t0"}, (0, 2)),
        ({"max_tier": "t0"}, (0, 0)),
        ({"min_tier": "t1", "max_tier": "t1"}, (1, 1)),
    ],
)
@pytest.mark.parametrize("policy", ["deadline", "load", "cascade"])
def test_a_policy_goes_no_lower_than_tiers_that_answer_unless_told_to(policy, wishes, bounds):
    request = PromptRequest("r", tier_policy=policy, **SOON, **wishes)
    chosen = choose_policy(request, FAMILY)
    assert (chosen.low, chosen.high) == bounds
    assert chosen.name == policy


@pytest.mark.parametrize(
    ("default", "wishes", "name"),
    [
        ("load", {}, "load"),
        ("load", {"max_tier": "t1"}, "load"),
        ("load", {"tier": "t1"}, "explicit"),
        ("load", {"tier_policy": "explicit"}, "explicit"),
        ("load", {"tier_policy": "cascade", "tier": "t1"}, "cascade"),
        ("deadline", {}, "explicit"),
        ("deadline", SOON, "deadline"),
        ("explicit", {}, "explicit"),
    ],
)
def test_the_servers_policy_holds_for_requests_that_name_neither_policy_nor_tier(
    default, wishes, name
):
    assert choose_policy(PromptRequest("r", **wishes), FAMILY, default).name == name


def test_a_cascade_has_its_own_threshold_or_the_usual_one():
    usual = PromptRequest("r", tier_policy="cascade")
    own = PromptRequest("r", tier_policy="cascade", cascade_threshold=-0.25)
    assert choose_policy(usual, FAMILY).cascade_threshold == CASCADE_THRESHOLD
    assert choose_policy(own, FAMILY).cascade_threshold == -0.25


@pytest.mark.parametrize("field", ["tier", "min_tier", "max_tier"])
@pytest.mark.parametrize("policy", [None, "load"])
def test_unknown_name_is_refused_with_the_known_ones(field, policy):
    request = PromptRequest("r", tier_policy=policy, **{field: "huge"})
    with pytest.raises(FamilyError, match="expected one of t0, t1, t2, got 'huge'"):
        choose_policy(request, FAMILY)


CASCADE = {"tier_policy": "cascade"}


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        (
            {"min_tier": "t2", "max_tier": "t0"},
            "min_tier: expected at most max_tier 't0', got 't2'",
        ),
        ({"tier": "t0", "min_tier": "t1"}, "tier: expected one between 't1' and 't2', got 't0'"),
        ({"tier": "t2", "max_tier": "t1"}, "tier: expected one between 't0' and 't1', got 't2'"),
        (
            {"tier_policy": "luck"},
            "tier_policy: expected one of explicit, deadline, load, cascade, got 'luck'",
        ),
        (
            {"tier_policy": "deadline"},
            "deadline: expected one with tier_policy 'deadline', got none",
        ),
        (
            {"tier_policy": "load", "min_tier": "t2", "max_tier": "t1"},
            "min_tier: expected at most max_tier 't1', got 't2'",
        ),
        (
            {"cascade_threshold": -1.0},
            "cascade_threshold: expected tier_policy 'cascade' with it, got 'explicit'",
        ),
        ({**CASCADE, "cascade_threshold": 0.5}, "cascade_threshold: .* at most 0, got 0.5"),
        ({**CASCADE, "cascade_threshold": float("nan")}, "cascade_threshold: .*, got nan"),
        ({**CASCADE, "cascade_threshold": float("-inf")}, "cascade_threshold: .*, got -inf"),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_line(wishes, message):
    with pytest.raises(InvalidRequestError, match=f"^{message}$"):
        choose_policy(PromptRequest("r", **wishes), FAMILY)
