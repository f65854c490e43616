"""The waiting queue keeps rank order: priority, then arrival."""

import random

import pytest

from host_logic import make_request
from mfs_trt.scheduler.queue import WaitingQueue, rank


def test_higher_priority_comes_first_then_earlier_arrival():
    queue = WaitingQueue()
    late = make_request("late", arrival=2.0)
    early = make_request("early", arrival=1.0)
    urgent = make_request("urgent", arrival=9.0, priority=1)
    for request in (late, urgent, early):
        queue.add(request)
    assert list(queue) == [urgent, early, late]


def test_requests_that_arrive_together_are_ordered_by_id():
    queue = WaitingQueue()
    requests = [make_request(name) for name in "cab"]
    for request in requests:
        queue.add(request)
    assert [r.request_id for r in queue] == ["a", "b", "c"]


def test_removing_takes_out_that_request_only():
    queue = WaitingQueue()
    requests = [make_request(str(i), arrival=i) for i in range(3)]
    for request in requests:
        queue.add(request)
    queue.remove(requests[1])
    assert list(queue) == [requests[0], requests[2]]
    assert len(queue) == 2
    with pytest.raises(ValueError):
        queue.remove(requests[1])


def test_order_is_that_of_sorting_whatever_the_order_of_adding():
    rng = random.Random(0)
    requests = [
        make_request(str(i), arrival=rng.randint(0, 5), priority=rng.randint(-1, 1))
        for i in range(50)
    ]
    queue = WaitingQueue()
    for request in rng.sample(requests, len(requests)):
        queue.add(request)
    assert list(queue) == sorted(requests, key=rank)
