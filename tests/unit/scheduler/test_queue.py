"""The waiting queue: priority, then whose time is up soonest, and nobody waits for ever."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from host_logic import add, make_request, make_scheduler, run_step
from mfs_trt.request import RequestStatus
from mfs_trt.scheduler.queue import MAX_AGE_S, WaitingQueue, admission_rank, rank


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
        make_request(
            str(i),
            arrival=rng.randint(0, 5),
            priority=rng.randint(-1, 1),
            deadline_time_s=rng.choice([None, 3.0, 8.0, 100.0]),
        )
        for i in range(50)
    ]
    queue = WaitingQueue()
    for request in rng.sample(requests, len(requests)):
        queue.add(request)
    assert list(queue) == sorted(requests, key=admission_rank)


# -- deadlines and age ---------------------------------------------------------------------------


def queued(*requests) -> list[str]:
    queue = WaitingQueue()
    for request in requests:
        queue.add(request)
    return [r.request_id for r in queue]


def test_of_one_priority_the_nearest_deadline_goes_first():
    assert queued(
        make_request("none", arrival=0.0),
        make_request("later", arrival=1.0, deadline_time_s=6.0),
        make_request("soon", arrival=2.0, deadline_time_s=4.0),
        make_request("important", arrival=3.0, priority=1),
    ) == ["important", "soon", "later", "none"]


def test_a_request_older_than_the_age_limit_goes_before_every_deadline_to_come():
    now = 100.0
    old = make_request("old", arrival=now - MAX_AGE_S - 0.1)
    urgent = make_request("urgent", arrival=now, deadline_time_s=now + 0.01)
    assert queued(urgent, old) == ["old", "urgent"]
    young = make_request("young", arrival=now - MAX_AGE_S / 2)
    assert queued(urgent, young) == ["urgent", "young"]


def test_a_deadline_far_away_is_no_reason_to_wait_longer():
    far = make_request("far", arrival=0.0, deadline_time_s=1e6)
    none = make_request("none", arrival=1.0)
    assert queued(none, far) == ["far", "none"]


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 30), st.none() | st.floats(0.01, 60)), min_size=1))
def test_nobody_goes_before_one_who_came_earlier_by_the_age_limit(load):
    requests = [
        make_request(str(i), arrival=t, deadline_time_s=None if d is None else t + d)
        for i, (t, d) in enumerate(load)
    ]
    latest = 0.0
    for request in sorted(requests, key=admission_rank):
        assert request.arrival_time_s >= latest - MAX_AGE_S
        latest = max(latest, request.arrival_time_s)


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 30), st.integers(0, 2)), min_size=1))
def test_without_deadlines_the_order_is_that_of_victims(load):
    requests = [make_request(str(i), arrival=t, priority=p) for i, (t, p) in enumerate(load)]
    assert sorted(requests, key=admission_rank) == sorted(requests, key=rank)


def test_a_stream_of_urgent_requests_does_not_starve_one_without_a_deadline():
    """One seat; every second brings a request that has two seconds left."""
    scheduler = make_scheduler(max_num_seqs=1)
    patient = make_request("patient", arrival=0.0, max_tokens=1)
    add(scheduler, make_request("first", arrival=0.0, max_tokens=1), patient)
    now = 0.0
    while patient.status is RequestStatus.WAITING and now < 5 * MAX_AGE_S:
        now += 1.0
        add(
            scheduler,
            make_request(f"u{now}", arrival=now, deadline_time_s=now + 2.0, max_tokens=1),
        )
        run_step(scheduler)
    assert MAX_AGE_S - 3 < now <= MAX_AGE_S + 1


def test_an_urgent_request_takes_the_next_seat_but_nobodys_own():
    scheduler = make_scheduler(max_num_seqs=1)
    runs = make_request("runs", arrival=0.0, max_tokens=3)
    waits = make_request("waits", arrival=1.0, max_tokens=1)
    urgent = make_request("urgent", arrival=2.0, deadline_time_s=2.5, max_tokens=1)
    add(scheduler, runs, waits)
    run_step(scheduler)
    add(scheduler, urgent)
    order = [list(run_step(scheduler).levels) for _ in range(4)]
    assert order == [["runs"], ["runs"], ["urgent"], ["waits"]]
    assert scheduler.num_preemptions == 0


def test_a_preempted_request_is_not_passed_by_an_urgent_one():
    preempted = make_request("preempted", arrival=5.0, num_preemptions=1)
    urgent = make_request("urgent", arrival=6.0, deadline_time_s=6.1)
    assert queued(urgent, preempted) == ["preempted", "urgent"]


def test_of_running_requests_the_youngest_makes_way_whatever_the_deadlines():
    """Memory for two; the younger one's deadline does not take the older one's blocks."""
    scheduler = make_scheduler(num_frames=5, groups=(1,), block_size=4)
    older = make_request("older", 4, arrival=0.0, max_tokens=10)
    add(scheduler, older)
    run_step(scheduler)
    add(scheduler, make_request("urgent", 4, arrival=1.0, deadline_time_s=1.5, max_tokens=10))
    while "older" in scheduler.requests:
        run_step(scheduler)
    assert scheduler.num_preemptions > 0 and older.num_preemptions == 0
