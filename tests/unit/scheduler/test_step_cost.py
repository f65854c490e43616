"""The seconds of a step are learnt from the steps before it."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from host_logic import add, make_request, make_scheduler, run_step
from mfs_trt.scheduler.plan import Plan
from mfs_trt.scheduler.step_cost import StepCost, StepWork, work_of_plans, work_of_step

GROUPS = (1, 2)


def seconds(work: StepWork) -> float:
    """A machine: 2 ms a step, 1 ms a segment, 0.1 ms a row and segment, and attention."""
    rows = sum(1e-3 * (n > 0) + 1e-4 * n for n in work.rows)
    return 2e-3 + rows + 2e-8 * work.pairs + 1e-7 * work.contexts


def step_of(rng: random.Random, num_decodes: int, num_prompt_rows: int) -> StepWork:
    work = StepWork([0, 0])
    for _ in range(num_decodes):
        context = rng.randint(10, 2000)
        for s in range(rng.randint(1, 2)):
            work.add(s, context, context + 1, GROUPS[s])
    first = rng.randint(0, 2000)
    if num_prompt_rows:
        for s in range(2):
            work.add(s, first, first + num_prompt_rows, GROUPS[s])
    return work


def taught(num_steps: int = 400, noise: float = 0.05) -> StepCost:
    rng = random.Random(0)
    cost = StepCost(GROUPS)
    for _ in range(num_steps):
        work = step_of(rng, rng.randint(1, 40), rng.choice([0, 0, 16, 64]))
        cost.observe(work, seconds(work) * rng.uniform(1 - noise, 1 + noise))
    return cost


TAUGHT = taught()


@pytest.mark.parametrize("num_decodes", [1, 8, 40])
@pytest.mark.parametrize("num_prompt_rows", [0, 8, 64])
def test_a_step_is_predicted_within_a_tenth(num_decodes, num_prompt_rows):
    work = step_of(random.Random(7), num_decodes, num_prompt_rows)
    assert taught().predict(work) == pytest.approx(seconds(work), rel=0.1)


def test_a_machine_that_becomes_slower_is_learnt_anew():
    cost, work = taught(), step_of(random.Random(1), 10, 0)
    for _ in range(100):
        cost.observe(work, 3 * seconds(work))
    assert cost.predict(work) == pytest.approx(3 * seconds(work), rel=0.1)


def test_one_interrupted_step_changes_little():
    cost, work = taught(), step_of(random.Random(1), 10, 0)
    before = cost.predict(work)
    cost.observe(work, 100 * seconds(work))
    assert cost.predict(work) < 1.2 * before


def test_what_no_step_shows_for_long_stays_known():
    cost, decode = taught(), step_of(random.Random(1), 10, 0)
    prompt = step_of(random.Random(2), 10, 64)
    for _ in range(20_000):
        cost.observe(decode, seconds(decode))
    assert cost.predict(prompt) == pytest.approx(seconds(prompt), rel=0.3)


def test_nothing_is_known_before_the_first_step():
    assert StepCost(GROUPS).predict(StepWork([4, 4])) == 0


@settings(deadline=None)
@given(st.floats(0, 1), st.integers(0, 4000))
def test_the_rows_within_a_time_are_the_most_that_take_no_longer(budget, context):
    cost = TAUGHT
    rows = cost.rows_within(budget, context)
    assert rows == 0 or cost.row_seconds(rows, context) <= budget * (1 + 1e-9)
    assert cost.row_seconds(rows + 1, context) >= budget * (1 - 1e-9)


def test_rows_behind_a_long_context_take_longer():
    cost = taught()
    assert cost.row_seconds(64, 2000) > 1.2 * cost.row_seconds(64, 0)


def test_work_counts_rows_pairs_and_contexts_by_layer_groups():
    request = make_request(num_prompt_tokens=10, tier=1)
    work = work_of_plans([Plan(request, 0, 1, [4, 4], [6, 5])], GROUPS)
    assert work.rows == [2, 1]
    assert work.pairs == 1 * (5 + 6) + 2 * 5 and work.contexts == 1 * 6 + 2 * 5


def test_the_work_of_a_step_is_the_work_of_its_plans():
    scheduler = make_scheduler(groups=GROUPS, budget=8)
    add(scheduler, make_request("a", 5, tier=1), make_request("b", 9, tier=0, arrival=1.0))
    for _ in range(4):
        requests = dict(scheduler.requests)
        output = scheduler.schedule()
        plans = []
        for request_id, counts in output.computed:
            first = requests[request_id].num_computed_tokens
            plans.append(Plan(requests[request_id], 0, len(counts) - 1, first, list(counts)))
        assert work_of_step(output.segments, GROUPS) == work_of_plans(plans, GROUPS)
        for request_id, counts in output.computed:
            requests[request_id].num_computed_tokens = list(counts)
        run_step(scheduler)
