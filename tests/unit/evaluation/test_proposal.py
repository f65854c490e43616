import pytest

from mfs_trt.errors import ConfigError
from mfs_trt.evaluation.proposal import propose_exits


def test_the_papers_tiers_of_forty_layers_share_groups_of_eight():
    found = propose_exits(40, [24, 32])
    assert found.exits == (8, 24, 32, 40)
    assert found.group_size == 8
    assert found.to_tiers() == "draft=8,small=24,medium=32,large=40"


def test_an_exit_moves_within_the_tolerance_for_a_larger_group():
    assert propose_exits(30, [17.4, 23]).exits == (6, 18, 24, 30)
    assert propose_exits(30, [17.4, 23], tolerance=0.0).exits == (6, 17, 23, 30)


def test_draft_tier_can_be_left_out():
    found = propose_exits(12, [8], has_draft=False)
    assert found.exits == (8, 12)
    assert found.names == ("small", "large")


def test_wishes_come_back_in_ascending_order():
    assert propose_exits(40, [32, 24]).exits == propose_exits(40, [24, 32]).exits


@pytest.mark.parametrize("wanted", [[3.0, 3.0], [1.0]])
def test_depths_that_cannot_be_told_apart_are_refused(wanted):
    with pytest.raises(ConfigError, match="apart from each other"):
        propose_exits(6, wanted, tolerance=0.0)


def test_many_tiers_of_a_deep_model_are_proposed_at_once():
    found = propose_exits(126, [126 * f for f in (0.4, 0.5, 0.6, 0.7, 0.8, 0.9)], tolerance=0.08)
    assert len(found.exits) == 8
    assert list(found.exits) == sorted(set(found.exits))
    assert found.group_size >= 2
