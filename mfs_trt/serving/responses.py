"""The open streams of the worker: events of each sequence, merged until a response can carry them.

`RequestStream` is one Triton request with its response sender; it has one `RowStream` for each row
of its batch, and that one `SequenceStream` for each sequence asked for. Nothing here is
thread-safe: the worker's lock is held around `push` and `take`; only the worker's response thread
calls `RequestStream.send`.
"""

import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from mfs_trt.errors import MfsError
from mfs_trt.request import TokenEvent
from mfs_trt.serving.tickets import TicketGate
from mfs_trt.serving.triton_requests import ParsedRow
from mfs_trt.serving.triton_responses import OutputChunk


class SequenceStream:
    """What one sequence produced and no response has carried yet."""

    def __init__(self, row: "RowStream", sequence_index: int):
        self.row = row
        self.sequence_index = sequence_index
        self.is_queued = False  # waits for the response thread
        self.is_finished = False  # its last response was taken
        self.first_token_time_ns = 0
        self.last_token_time_ns = 0
        self.num_output_tokens = 0
        self._events: list[TokenEvent] = []

    def push(self, event: TokenEvent) -> bool:
        """Keep an event; returns whether a response is due."""
        if event.token_ids:
            self.last_token_time_ns = time.monotonic_ns()
            self.first_token_time_ns = self.first_token_time_ns or self.last_token_time_ns
            self.num_output_tokens += len(event.token_ids)
        if not (event.token_ids or event.text or event.finish_reason):
            return False
        self._events.append(event)
        return event.finish_reason is not None or self.row.parsed.options.is_streaming

    def take(self) -> OutputChunk | None:
        """Everything kept, as one response; None if nothing is."""
        events, self._events = self._events, []
        self.is_queued = False
        if not events or self.is_finished:
            return None
        last = events[-1]
        self.is_finished = last.finish_reason is not None
        logits = [event.logits for event in events if event.logits is not None]
        token_ids = tuple(token for event in events for token in event.token_ids)
        return OutputChunk(
            text="".join(event.text for event in events),
            token_ids=token_ids,
            log_probs=tuple(value for event in events for value in event.log_probs),
            logits=np.concatenate(logits) if logits else None,
            num_new_tokens=len(token_ids),
            cumulative_log_prob=last.cumulative_log_prob,
            num_prompt_tokens=last.num_prompt_tokens,
            tier=last.tier,
            finish_reason=last.finish_reason,
            arrival_time_ns=self.row.stream.arrival_time_ns,
            first_scheduled_time_ns=int(last.first_scheduled_time_s * 1e9),
            first_token_time_ns=self.first_token_time_ns,
            last_token_time_ns=self.last_token_time_ns,
            num_kv_blocks=last.num_kv_blocks,
            num_reused_blocks=last.num_reused_blocks,
            num_draft_tokens=last.num_draft_tokens,
            num_accepted_draft_tokens=last.num_accepted_draft_tokens,
        )


class RowStream:
    """One row of a request's batch: its sequences, or the error that ended them."""

    def __init__(self, stream: "RequestStream", parsed: ParsedRow, batch_index: int):
        self.stream = stream
        self.parsed = parsed
        self.batch_index = batch_index
        self.error: MfsError | None = None
        self.sequences = [SequenceStream(self, i) for i in range(parsed.prompt.params.n)]

    @property
    def request_id(self) -> str:
        return self.parsed.prompt.request_id

    @property
    def is_open(self) -> bool:
        return any(not sequence.is_finished for sequence in self.sequences)

    def close(self) -> None:
        for sequence in self.sequences:
            sequence.is_finished = True


class RequestStream:
    """One Triton request: every response of every row goes through its sender, the last with the
    final flag.
    """

    def __init__(self, client_id: str, rows: Sequence[ParsedRow], gate: TicketGate | None = None):
        self.client_id = client_id  # "": the client gave none
        self.arrival_time_ns = time.monotonic_ns()
        self.rows = [RowStream(self, parsed, i) for i, parsed in enumerate(rows)]
        self.is_closed = False
        self.is_cancelled = False  # the engine was told to stop its rows
        self.gate = gate  # None: the request came to the worker model itself
        self.is_attached = False
        self._requested: frozenset[str] = frozenset()
        self._sender: Any = None
        self._deferred: Any = None  # the last response, waiting for tickets to come back
        # After the final flag the sender must not be touched, by either thread.
        self._sender_lock = threading.Lock()

    def attach(self, sender: Any, requested: frozenset[str]) -> None:
        """Answers go to `sender`, with the outputs in `requested`."""
        self._sender, self._requested, self.is_attached = sender, requested, True

    def requested_for(self, row: RowStream) -> frozenset[str]:
        """The wanted outputs; indices are left out where there is only one to tell apart."""
        idle = set()
        if len(self.rows) == 1:
            idle.add("batch_index")
        if len(row.sequences) == 1:
            idle.add("sequence_index")
        return self._requested - idle

    def send(self, response: Any, final_flag: int) -> None:
        """Send one response, with the final flag if no row is open any more.

        Behind a gate the last one may have to wait: `send_deferred`.
        """
        if any(row.is_open for row in self.rows):
            self._send(response, 0)
            return
        if self.gate is not None:
            self.gate.close()
            if not self.gate.is_drained:
                self._deferred = response
                return
        self._send(response, final_flag)

    def send_deferred(self, final_flag: int) -> None:
        """Send the last response if it waits and nothing keeps it any more."""
        if self._deferred is not None and self.gate is not None and self.gate.is_drained:
            response, self._deferred = self._deferred, None
            self._send(response, final_flag)

    def _send(self, response: Any, flags: int) -> None:
        with self._sender_lock:
            if self.is_closed:
                return
            sender = self._sender
            if flags:
                self.is_closed, self._sender = True, None
            sender.send(response, flags=flags)

    def is_cancelled_by_client(self) -> bool:
        """Ask Triton server whether the client went away or cancelled; behind a gate it cannot
        tell.
        """
        with self._sender_lock:
            if self._sender is None or self.gate is not None:
                return False
            return self._sender.is_cancelled()
