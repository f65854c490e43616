"""AsyncEngine: the thread that owns an `EngineCore`, and the thread that answers.

Any thread may submit and cancel. The engine thread steps; the response thread calls back and keeps
deadlines, so that an answer never waits for a step and a slow answer never delays one. Whatever
fails, every open request gets a last event.
"""

import heapq
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from mfs_trt.errors import (
    DeadlineExceededError,
    EngineFailedError,
    EngineUnavailableError,
    InvalidRequestError,
    MfsError,
    QueueFullError,
    RequestCancelledError,
    RequestTooLargeError,
)
from mfs_trt.request import PromptRequest, Request, TokenEvent
from mfs_trt.serving.core import EngineCore
from mfs_trt.serving.engine_stats import EngineCounters, EngineStats

logger = logging.getLogger("mfs_trt")

MAX_FAILED_STEPS = 3  # in a row, without one that works between: then the engine is unhealthy

OnEvent = Callable[[TokenEvent], None]


@dataclass
class _Stream:
    """An accepted request that has not had its last event."""

    request: PromptRequest  # as the caller made it
    on_event: OnEvent
    num_open_sequences: int


class AsyncEngine:
    """Serves one core to many threads."""

    def __init__(self, core: EngineCore, max_queue_size: int = 1024) -> None:
        self._core = core
        self.family, self.tokenizer, self.limits = core.family, core.tokenizer, core.limits
        self.max_queue_size = max_queue_size
        self._lock = threading.Lock()  # guards the seven below
        self._streams: dict[str, _Stream] = {}  # by serial: an id may return while its events fly
        self._serials: dict[str, str] = {}  # the caller's id → serial, while open
        self._arrived: list[Request] = []
        self._aborted: list[str] = []
        self._switches: list[tuple[str, str]] = []  # serial, tier
        self._deadlines: list[tuple[float, str]] = []  # heap of (monotonic time, serial)
        self._is_accepting = True
        self._next_serial = itertools.count()
        self._work = threading.Condition(self._lock)
        self._answered = threading.Condition(self._lock)
        self._responses: queue.SimpleQueue[TokenEvent | None] = queue.SimpleQueue()
        self._counters = EngineCounters()
        self._num_failed_steps = 0
        self._is_healthy = True
        self._is_stopping = False
        self._engine_thread = threading.Thread(
            target=self._run_engine, name="mfs-engine", daemon=True
        )
        self._response_thread = threading.Thread(
            target=self._run_responses, name="mfs-responses", daemon=True
        )

    def start(self) -> None:
        self._engine_thread.start()
        self._response_thread.start()

    # -- for any thread --------------------------------------------------------------------------

    def submit(self, request: PromptRequest, on_event: OnEvent) -> None:
        """Accept a request; `on_event` is called from the response thread until its last event.

        Raises, with nothing accepted: `InvalidRequestError`, `RequestTooLargeError`, `FamilyError`,
        `QueueFullError`, `EngineUnavailableError`.
        """
        self._check_accepting()
        serial = str(next(self._next_serial))
        sequences = self._core.make_requests(replace(request, request_id=serial))
        deadline = sequences[0].deadline_time_s
        with self._lock:
            self._check_accepting()
            if request.request_id in self._serials:
                raise InvalidRequestError(
                    f"request_id: expected one that is not in use, got {request.request_id!r}"
                )
            num_waiting = len(self._core.scheduler.waiting) + len(self._arrived)
            if num_waiting + len(sequences) > self.max_queue_size:
                raise QueueFullError(
                    f"queue is full: {num_waiting} requests wait, max_queue_size is "
                    f"{self.max_queue_size}; try again later"
                )
            self._streams[serial] = _Stream(request, on_event, len(sequences))
            self._serials[request.request_id] = serial
            if deadline is not None:
                heapq.heappush(self._deadlines, (deadline, serial))
            self._arrived += sequences
            self._work.notify()
        if deadline is not None:
            self._responses.put(None)  # wakes the response thread: a new deadline to keep

    def cancel(self, request_id: str) -> bool:
        """End a request with `RequestCancelledError`; False when no such request is open."""
        with self._lock:
            serial = self._serials.get(request_id)
        error = RequestCancelledError(f"request {request_id} was cancelled")
        return serial is not None and self._end(serial, error)

    def switch_tier(self, request_id: str, tier: str) -> bool:
        """Run an open request at another tier from its next token on; False: no such request.

        Raises `FamilyError` for an unknown tier. Where the arena could never hold the request at
        that tier, it stays where it is and the log says so.
        """
        self.family.tier_index(tier)
        with self._lock:
            serial = self._serials.get(request_id)
            if serial is None:
                return False
            self._switches.append((serial, tier))
            self._work.notify()
        return True

    def stats(self) -> EngineStats:
        with self._lock:
            num_arrived, num_open = len(self._arrived), len(self._streams)
        return self._counters.stats(
            self._core,
            num_arrived=num_arrived,
            num_open_requests=num_open,
            is_healthy=self._is_healthy,
            is_draining=not self._is_accepting,
        )

    def drain(self, timeout_s: float) -> bool:
        """Stop accepting and wait until every open request is answered; False when time ran out."""
        with self._lock:
            self._is_accepting = False
            return self._answered.wait_for(lambda: not self._streams, timeout_s)

    def shutdown(self) -> None:
        """Answer what is still open with an error and stop both threads."""
        with self._lock:
            self._is_accepting = False
            self._is_stopping = True
            self._work.notify()
            serials = list(self._streams)
        for serial in serials:
            self._end(serial, EngineUnavailableError("the server is shutting down"))
        self._engine_thread.join()
        self._responses.put(None)
        self._response_thread.join()
        self._core.engine.close()

    # -- both threads ----------------------------------------------------------------------------

    def _check_accepting(self) -> None:
        if not self._is_healthy:
            raise EngineUnavailableError("the engine is unhealthy: see the server's log")
        if not self._is_accepting:
            raise EngineUnavailableError("the server is draining and accepts no new requests")

    def _end(self, serial: str, error: MfsError) -> bool:
        """Answer an open request with `error` now, and have the engine drop it."""
        with self._lock:
            if serial not in self._streams:
                return False
            self._release_id(serial)
            self._aborted.append(serial)
            self._work.notify()
        self._responses.put(TokenEvent(serial, 0, error=error))
        return True

    def _release_id(self, serial: str) -> None:
        """Free the caller's id for another request; called with the lock held."""
        request_id = self._streams[serial].request.request_id
        if self._serials.get(request_id) == serial:
            del self._serials[request_id]

    # -- the engine thread -----------------------------------------------------------------------

    def _run_engine(self) -> None:
        while True:
            try:
                if not self._take_commands():
                    return
                if self._core.has_requests:
                    for event in self._core.step_tokens():
                        self._responses.put(event)
                    self._num_failed_steps = 0
            except Exception as error:  # the thread must outlive any fault of a step
                self._fail(error)

    def _take_commands(self) -> bool:
        """Apply arrivals and aborts; waits for one when idle. False: stop."""
        with self._lock:
            while not (self._arrived or self._aborted or self._core.has_requests):
                if self._is_stopping and not self._streams:
                    return False
                self._work.wait()
            arrived, self._arrived = self._arrived, []
            aborted, self._aborted = self._aborted, []
            # Under the lock: a request between the two lists would escape the queue's limit.
            for request in arrived:
                self._core.add(request)
            for serial in aborted:
                self._core.abort(serial)
            switches, self._switches = self._switches, []
        for serial, tier in switches:
            try:
                self._core.switch_tier(serial, tier)
            except RequestTooLargeError as error:
                logger.warning("a request stays at its tier: %s", error)
        return True

    def _fail(self, error: Exception) -> None:
        """A step failed: answer every open request, start from an empty core."""
        logger.exception("engine step failed; every open request is ended with an error")
        self._num_failed_steps += 1
        if self._num_failed_steps >= MAX_FAILED_STEPS:
            self._is_healthy = False
            logger.critical(
                "engine is unhealthy after %d failed steps in a row: it refuses requests",
                self._num_failed_steps,
            )
        with self._lock:
            serials = list(self._streams)
            self._arrived.clear()
            self._aborted.clear()
            self._switches.clear()
            self._counters.keep(self._core.scheduler)
            self._core.reset()
        cause = f"{type(error).__name__}: {error}"
        failure = EngineFailedError(f"engine step failed ({cause}); send the request again")
        for serial in serials:
            self._responses.put(TokenEvent(serial, 0, error=failure))

    # -- the response thread ---------------------------------------------------------------------

    def _run_responses(self) -> None:
        while True:
            try:
                event = self._responses.get(timeout=self._next_deadline_in_s())
            except queue.Empty:
                event = None
            if event is None and not self._engine_thread.is_alive() and self._responses.empty():
                return
            try:
                if event is not None:
                    self._respond(event)
                self._expire()
            except Exception:  # the thread must outlive any fault: everybody waits for it
                logger.exception("an answer failed")

    def _next_deadline_in_s(self) -> float | None:
        with self._lock:
            return max(0.0, self._deadlines[0][0] - time.monotonic()) if self._deadlines else None

    def _expire(self) -> None:
        """Answer what has missed its deadline, whatever the engine is doing."""
        now = time.monotonic()
        expired: list[tuple[str, PromptRequest]] = []
        with self._lock:
            while self._deadlines and self._deadlines[0][0] <= now:
                _, serial = heapq.heappop(self._deadlines)
                if serial in self._streams:
                    expired.append((serial, self._streams[serial].request))
            self._aborted += [serial for serial, _ in expired]
            if expired:
                self._work.notify()
        for serial, request in expired:
            assert request.deadline_s is not None
            error = DeadlineExceededError(
                f"request {request.request_id} missed its deadline of "
                f"{request.deadline_s * 1000:.0f} ms"
            )
            self._respond(TokenEvent(serial, 0, error=error))

    def _respond(self, event: TokenEvent) -> None:
        """Call back, unless the request has had its last event."""
        event = self._with_text(event)
        with self._lock:
            stream = self._streams.get(event.request_id)
            if stream is None:
                return
            if event.finish_reason is not None:
                stream.num_open_sequences -= 1
            is_last = event.error is not None or stream.num_open_sequences == 0
            if is_last:
                self._release_id(event.request_id)
        self._counters.count(event, is_last)
        try:
            stream.on_event(replace(event, request_id=stream.request.request_id))
        except Exception:  # one broken callback must not stop the others' answers
            logger.exception("answering request %s failed; dropped", stream.request.request_id)
            self._counters.num_failed += not is_last
            is_last = True
            with self._lock:
                self._release_id(event.request_id)
                self._aborted.append(event.request_id)
                self._work.notify()
        if is_last:
            self._close(event.request_id)

    def _with_text(self, event: TokenEvent) -> TokenEvent:
        """The text is made here, beside the engine's next step; a fault in it ends the request."""
        try:
            return self._core.add_text(event)
        except Exception as error:
            logger.exception("the text of a request could not be made; it is ended")
            with self._lock:
                self._aborted.append(event.request_id)
                self._work.notify()
            failure = EngineFailedError(f"no text: {type(error).__name__}: {error}")
            return TokenEvent(event.request_id, event.sequence_index, error=failure)

    def _close(self, serial: str) -> None:
        with self._lock:
            del self._streams[serial]
            self._work.notify()  # a stopping engine thread waits for the last one
            self._answered.notify_all()
