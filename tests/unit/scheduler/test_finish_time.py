"""Predicted finishes on a machine whose costs are known."""

import pytest

from mfs_trt.scheduler.finish_time import decode_work, seconds_by_tier
from mfs_trt.scheduler.step_cost import StepCost, StepWork

GROUPS = (1, 1, 2)


class Machine(StepCost):
    """1 ms a step, 1 ms a segment that runs, 0.1 ms a row and segment."""

    def predict(self, work: StepWork) -> float:
        return 1e-3 + sum(1e-3 * (n > 0) + 1e-4 * n for n in work.rows)


MACHINE = Machine(GROUPS)
IDLE = StepWork([0, 0, 0])


def predict(counts, **more):
    fields = {
        "num_tokens": 101,
        "tokens_left": 10,
        "beside": IDLE,
        "rows_per_step": 1000,
        "cost": MACHINE,
    }
    return seconds_by_tier(counts, **{**fields, **more})


def test_a_request_that_lacks_nothing_needs_its_tokens_at_the_tiers_own_price():
    assert predict([100, 100, 100]) == pytest.approx([10 * 2.1e-3, 10 * 3.2e-3, 10 * 4.3e-3])


def test_deeper_segments_first_catch_up_with_all_tokens():
    shallow, middle, deep = predict([100])
    assert shallow == pytest.approx(10 * 2.1e-3)
    assert middle == pytest.approx(10 * 3.2e-3 + 2e-3 + 100e-4)
    assert deep == pytest.approx(10 * 4.3e-3 + 3e-3 + 200e-4)


def test_catching_up_in_chunks_takes_the_steps_overhead_for_each():
    (at_once, _, _), (in_chunks, _, _) = predict([0]), predict([0], rows_per_step=10)
    assert in_chunks - at_once == pytest.approx(9 * 2e-3)


def test_others_rows_make_every_step_dearer():
    beside = decode_work([(2, 50)] * 5, GROUPS)
    assert beside.rows == [5, 5, 5]
    assert predict([100], beside=beside)[0] == pytest.approx(10 * (4e-3 + 16e-4))
    assert beside.rows == [5, 5, 5], "a view was changed"


def test_a_draft_computed_ahead_of_the_final_tokens_is_nothing_missing():
    assert predict([104, 104, 104]) == pytest.approx(predict([100, 100, 100]))


def test_a_longer_context_is_dearer_where_the_machine_says_so():
    class Reader(StepCost):
        def predict(self, work):
            return work.contexts

    short, long = (predict([n, n, n], num_tokens=n + 1, cost=Reader(GROUPS)) for n in (100, 1000))
    assert all(a < b for a, b in zip(short, long, strict=True))
    assert short == pytest.approx([10 * 106, 20 * 106, 40 * 106])


def test_a_machine_that_seems_cheaper_for_longer_contexts_or_deeper_tiers_is_not_believed():
    class Wrong(StepCost):
        def predict(self, work):
            return 100.0 - work.contexts

    seconds = predict([10, 10, 10], num_tokens=11, cost=Wrong(GROUPS))
    assert seconds == [10 * (100.0 - 11)] * 3
