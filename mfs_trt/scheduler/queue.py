"""WaitingQueue: requests that hold no memory, in rank order: priority first, then arrival."""

from bisect import insort
from collections.abc import Iterator

from mfs_trt.request import Request


def rank(request: Request) -> tuple[int, float, str]:
    """Smaller runs first. A preempted request keeps its rank: later arrivals do not pass it."""
    return (-request.priority, request.arrival_time_s, request.request_id)


class WaitingQueue:
    """Ordered by `rank`."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def add(self, request: Request) -> None:
        insort(self._requests, request, key=rank)

    def remove(self, request: Request) -> None:
        self._requests.remove(request)
