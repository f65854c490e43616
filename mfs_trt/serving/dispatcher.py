"""Dispatcher: the thread that turns queued events into responses, and the streams that it answers.

The engine's response thread calls `on_event`, which only queues; the thread here merges what is
queued for a sequence and sends it, so that a slow send delays no other answer's computation.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from mfs_trt.errors import (
    DeadlineExceededError,
    EngineFailedError,
    EngineUnavailableError,
    FamilyError,
    InvalidRequestError,
    MfsError,
    QueueFullError,
    RequestCancelledError,
)
from mfs_trt.request import TokenEvent
from mfs_trt.serving.metrics import FinishedSequence, WorkerMetrics
from mfs_trt.serving.responses import RequestStream, RowStream, SequenceStream
from mfs_trt.serving.triton_responses import OutputChunk, build_outputs, echo_prompt

logger = logging.getLogger(__name__)

# First match counts; the name is that of a code of pb_utils.TritonError.
_ERROR_CODES: tuple[tuple[type[MfsError], str], ...] = (
    (InvalidRequestError, "INVALID_ARG"),
    (FamilyError, "INVALID_ARG"),
    (QueueFullError, "UNAVAILABLE"),
    (EngineUnavailableError, "UNAVAILABLE"),
    (DeadlineExceededError, "UNAVAILABLE"),
    (RequestCancelledError, "CANCELLED"),
)


class Dispatcher:
    """Owns the open streams. `cancel` ends a request in the engine; `tokenizer` may be None."""

    def __init__(
        self,
        pb_utils: Any,
        tokenizer: Any,
        metrics: WorkerMetrics,
        cancel: Callable[[str], object],
        on_closed: Callable[[RequestStream], None],
    ):
        self._pb_utils = pb_utils
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._cancel = cancel
        self._on_closed = on_closed
        self._final_flag = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        self._streams: set[RequestStream] = set()
        self._queue: deque[SequenceStream | RowStream | RequestStream] = deque()
        self._wake = threading.Condition()  # guards the two above and what streams keep
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="mfs-dispatch", daemon=True)
        self._thread.start()

    # -- for any thread --------------------------------------------------------------------------

    def open(self, stream: RequestStream) -> None:
        with self._wake:
            self._streams.add(stream)

    def discard(self, stream: RequestStream) -> None:
        """Forget a stream that never got a sender."""
        with self._wake:
            self._streams.discard(stream)

    def open_streams(self) -> list[RequestStream]:
        with self._wake:
            return list(self._streams)

    def on_event(self, row: RowStream, event: TokenEvent) -> None:
        """Queue what an event brings; a response follows if one is due."""
        if event.error is not None:
            self.fail(row, event.error)
            return
        with self._wake:
            sequence = row.sequences[event.sequence_index]
            if sequence.push(event) and not sequence.is_queued:
                sequence.is_queued = True
                self._put(sequence)

    def fail(self, row: RowStream, error: MfsError) -> None:
        """Queue the end of a row, behind what its sequences have queued; the first error counts."""
        with self._wake:
            if row.error is None:
                # Without its frames: they hold Triton server's objects, which must not live on.
                row.error = error.with_traceback(None)
                self._put(row)

    def release(self, stream: RequestStream) -> None:
        """Send the last response of a stream, if it waited for its tickets and all are back."""
        if stream.gate is not None and stream.gate.is_drained:
            with self._wake:
                self._put(stream)

    def refuse(self, sender: Any, error: MfsError) -> None:
        """Answer a request that never became a stream."""
        try:
            sender.send(self._error_response(error), flags=self._final_flag)
        except Exception:
            logger.exception("an error could not be sent: %s", error_text(error))

    def close(self) -> None:
        """Send what is queued, then end the thread."""
        with self._wake:
            self._is_stopping = True
            self._wake.notify()
        self._thread.join(timeout=10)

    # -- the thread ------------------------------------------------------------------------------

    def _put(self, item: SequenceStream | RowStream | RequestStream) -> None:
        self._queue.append(item)
        self._wake.notify()

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._queue and not self._is_stopping:
                    self._wake.wait()
                if not self._queue:
                    return
                item = self._queue.popleft()
                chunk = item.take() if isinstance(item, SequenceStream) else None
            stream = self._send(item, chunk)
            if stream.is_closed:
                self.discard(stream)
                self._on_closed(stream)

    def _send(
        self, item: SequenceStream | RowStream | RequestStream, chunk: OutputChunk | None
    ) -> RequestStream:
        """Send what one entry of the queue stands for; returns its stream. Never raises."""
        if isinstance(item, RequestStream):
            try:
                item.send_deferred(self._final_flag)
            except Exception:
                logger.exception("the last response of a request is lost")
            return item
        row = item.row if isinstance(item, SequenceStream) else item
        try:
            if isinstance(item, RowStream) and row.is_open:
                row.close()
                assert row.error is not None
                row.stream.send(self._error_response(row.error), self._final_flag)
            elif isinstance(item, SequenceStream) and chunk is not None:
                self._send_chunk(item, chunk)
        except Exception as error:
            logger.exception("a response of %s could not be sent", row.request_id)
            self._give_up(row, error)
        return row.stream

    def _send_chunk(self, sequence: SequenceStream, chunk: OutputChunk) -> None:
        row = sequence.row
        requested = row.stream.requested_for(row)
        if chunk.finish_reason is not None:
            self._record(sequence, chunk)
        chunk = echo_prompt(chunk, row.parsed, requested, self._tokenizer)
        arrays = build_outputs(
            chunk, row.parsed.options, row.batch_index, sequence.sequence_index, requested
        )
        tensors = [self._pb_utils.Tensor(name, array) for name, array in arrays.items()]
        row.stream.send(self._pb_utils.InferenceResponse(output_tensors=tensors), self._final_flag)

    def _give_up(self, row: RowStream, error: Exception) -> None:
        """End a row whose response could not be made or sent; its stream must not stay open."""
        self._cancel(row.request_id)
        row.close()
        try:
            failure = EngineFailedError(one_line(error))
            row.stream.send(self._error_response(failure), self._final_flag)
        except Exception:
            logger.exception("the stream of %s is lost", row.request_id)

    def _error_response(self, error: MfsError) -> Any:
        pb = self._pb_utils
        code = getattr(pb.TritonError, error_code(error))
        return pb.InferenceResponse(
            output_tensors=[], error=pb.TritonError(error_text(error), code)
        )

    def _record(self, sequence: SequenceStream, chunk: OutputChunk) -> None:
        self._metrics.record(
            FinishedSequence(
                chunk.tier,
                chunk.num_prompt_tokens,
                sequence.num_output_tokens,
                chunk.arrival_time_ns,
                chunk.first_token_time_ns,
                chunk.last_token_time_ns,
            )
        )


def error_code(error: MfsError) -> str:
    """Name of the Triton error code for one of our errors."""
    return next((code for kind, code in _ERROR_CODES if isinstance(error, kind)), "INTERNAL")


def error_text(error: MfsError) -> str:
    """`[CODE] ClassName: message`: over HTTP and in gRPC streams Triton server drops the code."""
    return f"[{error_code(error)}] {type(error).__name__}: {error}"


def one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, MfsError) else f"{type(error).__name__}: {text}"
