"""Tickets: how a request that came through an ensemble learns that its client went away.

Triton server tells a model of cancellation only at the moment when an ensemble schedules a step. So
the drop-in ensembles have two steps, both the worker model: the first takes the whole request and
answers with *tickets*, the second takes a ticket. The first ticket opens the stream of answers;
each later one, sent once a period, comes back as a request of its own that knows whether the client
is still there, and is answered with nothing.

The ensemble ends, and sets the final flag, when no step is in flight. So the first step is closed,
and every ticket is back, before the last answer is sent.
"""

import secrets
import threading
import time
from collections.abc import Callable
from typing import Any


class TicketGate:
    """The first step of one ensemble request: sends tickets until it is closed. Thread-safe."""

    def __init__(self, sender: Any, make_response: Callable[[int], Any], final_flag: int):
        self.number = secrets.randbits(64)  # not to be guessed: whoever holds it gets the answers
        self.opened_at_s = time.monotonic()
        self.closed_at_s: float | None = None
        self._sender = sender
        self._make_response = make_response
        self._final_flag = final_flag
        self._num_out = 0  # tickets sent that did not come back
        self._lock = threading.Lock()

    @property
    def is_drained(self) -> bool:
        """Closed, with every ticket back: the last answer may be sent."""
        return self.closed_at_s is not None and self._num_out == 0

    def send(self) -> None:
        """Send a ticket, unless the gate is closed or one is still on its way."""
        with self._lock:
            if self.closed_at_s is None and self._num_out == 0:
                self._sender.send(self._make_response(self.number))
                self._num_out += 1

    def give_back(self) -> None:
        """A ticket came back and was answered."""
        with self._lock:
            self._num_out = max(0, self._num_out - 1)

    def close(self) -> None:
        """Send no more tickets; ends the first step."""
        with self._lock:
            if self.closed_at_s is None:
                self.closed_at_s = time.monotonic()
                sender, self._sender = self._sender, None
                sender.send(flags=self._final_flag)

    def give_up(self) -> None:
        """Stop waiting for tickets that do not come back."""
        with self._lock:
            self._num_out = 0
