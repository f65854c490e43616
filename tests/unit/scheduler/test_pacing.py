"""Prompts leave running decodes their time."""

import random

import pytest

from host_logic import add, make_request, make_scheduler, run_step
from mfs_trt.scheduler.pacing import MIN_ROWS, Pacing, StepCost


def seconds(rows) -> float:
    """A machine: 2 ms a step, 1 ms a segment, 0.1 ms a row and segment."""
    return 2e-3 + sum(1e-3 * (n > 0) + 1e-4 * n for n in rows)


def taught(pacing: Pacing) -> Pacing:
    rng = random.Random(0)
    for _ in range(200):
        low = rng.randint(1, 100)
        rows = [low, rng.randint(0, low)]
        pacing.cost.observe(rows, seconds(rows) * rng.uniform(0.95, 1.05))
    return pacing


@pytest.mark.parametrize("rows", [[1, 1], [8, 4], [60, 60], [30, 0]])
def test_the_cost_of_a_step_is_learnt_within_a_tenth(rows):
    cost = taught(Pacing(2)).cost
    assert cost.predict(rows) == pytest.approx(seconds(rows), rel=0.1)


def test_a_machine_that_becomes_slower_is_learnt_anew():
    cost = taught(Pacing(2)).cost
    for _ in range(200):
        cost.observe([10, 10], 3 * seconds([10, 10]))
    assert cost.predict([10, 10]) == pytest.approx(3 * seconds([10, 10]), rel=0.1)


def test_a_step_with_prompts_stays_within_the_target():
    pacing = taught(Pacing(2, max_stretch=1.8))
    rows = pacing.prompt_rows([4, 4])
    assert rows is not None and rows > MIN_ROWS
    stretch = seconds([4 + rows, 4 + rows]) / seconds([4, 4])
    assert 1.5 < stretch < 2.0


def test_an_absolute_target_replaces_the_relative_one():
    pacing = taught(Pacing(2, max_step_s=0.02))
    rows = pacing.prompt_rows([4, 4])
    assert seconds([4 + rows, 4 + rows]) == pytest.approx(0.02, rel=0.15)


def test_a_target_that_decodes_alone_exceed_still_lets_prompts_on():
    assert taught(Pacing(2, max_step_s=1e-4)).prompt_rows([4, 4]) == MIN_ROWS


def test_nothing_is_limited_without_decodes_or_before_anything_is_known():
    assert taught(Pacing(2)).prompt_rows([0, 0]) is None
    assert Pacing(2).prompt_rows([4, 4]) is None
    assert StepCost(2).predict([4, 4]) == 0


def test_a_long_prompt_is_cut_while_another_request_decodes():
    scheduler = make_scheduler(groups=(1, 1), budget=64, max_model_len=512)
    scheduler.pacing = taught(Pacing(2))
    decoding = make_request("decoding", tier=1, num_prompt_tokens=4, max_tokens=3)
    add(scheduler, decoding)
    run_step(scheduler)
    long = make_request("long", tier=1, num_prompt_tokens=300, arrival=1.0)
    add(scheduler, long)
    output = run_step(scheduler)
    assert 1 < output.num_tokens < 1 + 64
    while "decoding" in scheduler.requests:
        run_step(scheduler)
    assert run_step(scheduler).num_tokens == 64  # nobody waits for the step
