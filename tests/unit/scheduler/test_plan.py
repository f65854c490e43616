"""How far segments get, and which level runs: the one rule by hand."""

import pytest

from host_logic import make_request
from mfs_trt.scheduler.plan import level_to_run, make_plan

PLENTY = [100, 100, 100]


def no_features(boundary: int, first: int) -> int:
    return first


def features_to(end: int):
    return lambda boundary, first: max(first, end)


def speculating(drafts: int = 0, **fields):
    """Tier 2 with drafts of tier 0, prompt of 10 tokens computed, `drafts` drafted."""
    request = make_request(num_prompt_tokens=10, tier=2, draft_levels=(0,), **fields)
    request.num_computed_tokens = [9, 9, 9]
    for i in range(drafts):
        request.num_computed_tokens[0] = request.num_tokens
        request.stand(0, [1000 + i], [None])
    return request


def test_a_prompt_fills_all_segments_up_to_the_smallest_budget():
    request = make_request(num_prompt_tokens=10, tier=2)
    plan = make_plan(request, 0, [100, 6, 4], no_features)
    assert plan.first == [0, 0, 0] and plan.last == [4, 4, 4]
    assert plan.num_exit_rows == 0


def test_a_decoding_request_has_one_row_in_each_segment_and_one_at_its_exit():
    request = make_request(num_prompt_tokens=10, tier=1)
    request.num_computed_tokens = [9, 9]
    plan = make_plan(request, 0, PLENTY, no_features)
    assert (plan.first, plan.last) == ([9, 9], [10, 10]) and plan.num_exit_rows == 1


def test_a_deeper_segment_catches_up_from_features():
    request = make_request(num_prompt_tokens=10, tier=1)
    request.num_computed_tokens = [9, 0]
    plan = make_plan(request, 0, PLENTY, features_to(9))
    assert (plan.first, plan.last) == ([9, 0], [10, 10])


def test_missing_features_are_made_again_from_the_first_hole_on():
    request = make_request(num_prompt_tokens=10, tier=1)
    request.num_computed_tokens = [9, 0]
    plan = make_plan(request, 0, PLENTY, features_to(4))
    assert (plan.first, plan.last) == ([4, 0], [10, 10])
    assert plan.counts == (10, 10)


def test_catching_up_in_chunks_never_passes_the_segment_below():
    request = make_request(num_prompt_tokens=10, tier=1)
    request.num_computed_tokens = [9, 0]
    plan = make_plan(request, 0, [3, 3], no_features)
    assert (plan.first, plan.last) == ([0, 0], [3, 3]) and plan.counts == (9, 3)


def test_rows_whose_logits_decide_come_in_one_step():
    request = speculating(drafts=3)
    assert make_plan(request, 1, [100, 3, 3], features_to(12)).num_exit_rows == 0
    plan = make_plan(request, 1, [100, 4, 4], features_to(12))
    assert plan.first == [12, 9, 9] and plan.last == [13, 13, 13]
    assert plan.num_exit_rows == 4


@pytest.mark.parametrize(("drafts", "level"), [(0, 0), (1, 0), (2, 1)])
def test_a_level_drafts_until_it_has_what_is_wanted(drafts, level):
    assert level_to_run(speculating(drafts), (2,)) == level


def test_no_more_is_drafted_than_the_request_may_still_say():
    assert level_to_run(speculating(drafts=1, max_tokens=2), (4,)) == 1
    assert level_to_run(speculating(max_tokens=1), (4,)) == 1


def test_nothing_is_drafted_behind_an_end_token():
    assert level_to_run(speculating(drafts=1, end_token_ids=[1000]), (4,)) == 1


def test_the_deepest_segments_catch_up_before_anything_is_drafted():
    request = speculating()
    request.num_computed_tokens = [9, 9, 3]
    assert level_to_run(request, (4,)) == 1


def test_the_highest_level_with_cause_verifies_first():
    request = make_request(num_prompt_tokens=10, tier=2, draft_levels=(0, 1))
    request.num_computed_tokens = [9, 9, 9]
    request.stand(1, [7, 8], [None, None])
    assert request.num_accepted == [12, 12, 10]
    assert level_to_run(request, (2, 2)) == 2
    assert level_to_run(request, (2, 3)) == 0


def test_a_level_that_has_run_the_last_token_already_leaves_it_to_the_next():
    request = speculating()
    request.num_computed_tokens = [10, 9, 9]  # as after a step in which the deepest caught up
    assert level_to_run(request, (4,)) == 1
