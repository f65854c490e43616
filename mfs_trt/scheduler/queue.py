"""WaitingQueue: requests that hold no memory, the most urgent of the highest priority first."""

from bisect import insort
from collections.abc import Iterator
from math import inf

from mfs_trt.request import Request

MAX_AGE_S = 10.0  # in the queue, until a request without deadline is as urgent as one that is due


def rank(request: Request) -> tuple[int, float, str]:
    """Smaller runs first. A preempted request keeps its rank: later arrivals do not pass it."""
    return (-request.priority, request.arrival_time_s, request.request_id)


def admission_rank(request: Request) -> tuple[int, float, float, str]:
    """Smaller is admitted first: of one priority, whose time is up soonest.

    That is its deadline, and in any case `MAX_AGE_S` after its arrival: who has waited longer goes
    before all who may still wait, so that no stream of urgent requests starves it. A preempted
    request goes before all others: they do not take the memory that it gave up. It is no order of
    victims: of running requests the youngest makes way (`rank`), whatever the deadlines.
    """
    due_s = request.arrival_time_s + MAX_AGE_S
    if request.deadline_time_s is not None:
        due_s = min(due_s, request.deadline_time_s)
    if request.num_preemptions:
        due_s = -inf
    return (-request.priority, due_s, request.arrival_time_s, request.request_id)


class WaitingQueue:
    """Ordered by `admission_rank`."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def add(self, request: Request) -> None:
        insort(self._requests, request, key=admission_rank)

    def remove(self, request: Request) -> None:
        self._requests.remove(request)
