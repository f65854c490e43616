"""What is left of a step while it is decided."""

from host_logic import make_request
from mfs_trt.scheduler.open_step import OpenStep
from mfs_trt.scheduler.plan import Plan


def test_a_preempted_request_gives_back_the_rows_that_it_was_to_compute():
    request = make_request("r", 5, tier=1)
    step = OpenStep([6, 5, 4])
    step.take(Plan(request, 0, 1, [4, 3], [5, 5]))
    assert step.rows_left == [5, 3, 4]
    step.preempt("r")
    assert (step.rows_left, step.plans, step.preempted) == ([6, 5, 4], {}, ["r"])


def test_a_request_that_was_not_to_run_has_nothing_to_give_back():
    step = OpenStep([6])
    step.preempt("r")
    assert (step.rows_left, step.preempted) == ([6], ["r"])
