"""Prompts leave running decodes their time."""

from dataclasses import replace

import pytest

from host_logic import add, make_request, make_scheduler, run_step
from mfs_trt.scheduler.pacing import Pacing
from mfs_trt.scheduler.step_cost import StepCost, StepWork


def taught(groups: tuple[int, ...] = (1, 1), **settings) -> Pacing:
    """Pacing on a machine of 2 ms a step and 0.1 ms a row and segment."""
    cost = StepCost(groups)
    for i in range(100):
        rows = [1 + i % 60, (1 + i % 60) * (i % 3 > 0)]
        cost.observe(StepWork(rows), 2e-3 + 1e-4 * sum(rows))
    return Pacing(cost, **settings)


def test_prompts_get_what_is_left_to_the_stretched_decode_step():
    spare = taught(max_stretch=1.8).spare_seconds(StepWork([4, 4]), 4, 1)
    assert spare == pytest.approx(0.8 * 2.8e-3, rel=0.05)


def test_an_absolute_target_replaces_the_relative_one():
    spare = taught(max_step_s=0.02).spare_seconds(StepWork([4, 4]), 4, 1)
    assert spare == pytest.approx(0.02 - 2.8e-3, rel=0.05)


@pytest.mark.parametrize(("num_prompts", "preference"), [(1, 1), (4, 1), (12, 3), (400, 5)])
def test_prompts_get_more_where_more_requests_wait_than_decode(num_prompts, preference):
    pacing = taught(max_stretch=1.8)
    alone = pacing.spare_seconds(StepWork([4, 4]), 4, 1)
    spare = pacing.spare_seconds(StepWork([4, 4]), 4, num_prompts)
    assert spare == pytest.approx(preference * alone)


def test_a_target_that_decodes_alone_exceed_leaves_nothing():
    assert taught(max_step_s=1e-4).spare_seconds(StepWork([4, 4]), 4, 1) == 0


def test_nothing_is_limited_without_decodes_or_before_anything_is_known():
    assert taught().spare_seconds(StepWork([0, 0]), 0, 1) is None
    assert Pacing(StepCost((1, 1))).spare_seconds(StepWork([4, 4]), 4, 1) is None


def decoding_beside(*prompts: int, **settings):
    """A scheduler with one running decode and prompts of these lengths that wait."""
    scheduler = make_scheduler(groups=(1, 1), budget=64, max_model_len=512)
    scheduler.pacing = taught(**settings)
    decoding = make_request("decoding", tier=1, num_prompt_tokens=4, max_tokens=3)
    add(scheduler, decoding)
    run_step(scheduler)
    for i, length in enumerate(prompts):
        add(scheduler, make_request(f"p{i}", tier=1, num_prompt_tokens=length, arrival=i + 1.0))
    return scheduler


def test_a_long_prompt_is_cut_while_another_request_decodes():
    scheduler = decoding_beside(300)
    assert 1 < run_step(scheduler).num_tokens < 1 + 64
    while "decoding" in scheduler.requests:
        run_step(scheduler)
    assert run_step(scheduler).num_tokens == 64  # nobody waits for the step


def test_the_first_prompt_gets_on_where_no_time_is_left_and_others_wait():
    scheduler = decoding_beside(300, 300, max_step_s=1e-4)
    for _ in range(2):
        assert run_step(scheduler).num_tokens == 1 + 8
    assert "p1" in {r.request_id for r in scheduler.waiting}


def test_a_burst_of_prompts_gets_more_than_a_single_one():
    few, many = (run_step(decoding_beside(*[300] * n)).num_tokens for n in (1, 3))
    assert few < many


def test_prompts_that_no_slot_is_free_for_press_nobody():
    scheduler = decoding_beside(300, 300, 300)
    one = run_step(decoding_beside(300)).num_tokens
    scheduler.limits = replace(scheduler.limits, max_num_seqs=2)
    assert run_step(scheduler).num_tokens == one
