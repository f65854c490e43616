"""The worker behind `model_repo/family/1/model.py`: Triton requests in, engine events out.

Threads: Triton server's calls `execute`, which parses, submits and returns at once; the
dispatcher's sends responses; one thread each asks after clients that went away and writes metrics.

Nothing may end the process: a dead stub hangs its clients' streams. Every thread's loop catches
what comes.
"""

import faulthandler
import gc
import itertools
import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mfs_trt.errors import (
    EngineFailedError,
    EngineUnavailableError,
    InvalidRequestError,
    MfsError,
    RequestCancelledError,
)
from mfs_trt.serving.config import STOPPING_NAME, ServeConfig, load_serve_config
from mfs_trt.serving.dispatcher import Dispatcher, one_line
from mfs_trt.serving.metrics import WorkerMetrics
from mfs_trt.serving.responses import RequestStream
from mfs_trt.serving.tickets import TicketGate
from mfs_trt.serving.triton_requests import (
    ParsedRow,
    check_parameters,
    is_stop_request,
    parse_request,
    read_switch,
    read_timeout,
)
from mfs_trt.serving.triton_spec import TICKET

logger = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 0.0005  # the engine thread waits this long at most for Python's lock
TICKET_LIFE_S = 30.0  # how long a ticket may be on its way through Triton server


class Worker:
    """One loaded worker model. `engine` is an `AsyncEngine`, started."""

    def __init__(
        self,
        pb_utils: Any,
        engine: Any,
        config: ServeConfig,
        *,
        name: str = "family",
        version: str = "1",
        stopping_file: Path | None = None,
    ):
        """`stopping_file`: while it exists, no client behind an ensemble is asked after, since a
        stopping Triton server refuses the step that a ticket asks for and drops its stream.
        """
        self._pb_utils = pb_utils
        self._engine = engine
        self._config = config
        self._stopping_file = stopping_file
        self._final_flag = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        self._numbers = itertools.count()
        self._by_ticket: dict[int, RequestStream] = {}
        self._ticket_lock = threading.Lock()  # guards the dict, and who attaches first
        self._metrics = WorkerMetrics(pb_utils, name, version)
        self._dispatcher = Dispatcher(
            pb_utils, engine.tokenizer, self._metrics, engine.cancel, self._forget_ticket
        )
        self._is_stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._repeat, args=args, name=f"mfs-{args[0]}", daemon=True)
            for args in (
                ("cancel", config.cancel_poll_s, self._cancel_abandoned),
                ("tickets", config.ticket_period_s, self._send_tickets),
                ("metrics", config.metrics_period_s, self._update_metrics),
            )
        ]
        for thread in self._threads:
            thread.start()

    @classmethod
    def load(
        cls,
        args: dict[str, str],
        pb_utils: Any,
        make_engine: Callable[[ServeConfig], Any] | None = None,
    ) -> "Worker":
        """Load the engine that `serve.json` names. `args` are those of Triton's `initialize`.

        Raises the backend's own exception with a one-line reason, which Triton server logs.
        """
        faulthandler.enable()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        logging.basicConfig(
            stream=sys.stderr,
            level=logging.INFO,
            format="mfs-trt %(levelname)s %(name)s: %(message)s",
        )
        try:
            config = _load_config(args)
            engine = (make_engine or start_engine)(config)
        except MfsError as error:
            raise pb_utils.TritonModelException(one_line(error)) from None
        except Exception as error:
            logger.exception("loading %s failed", args["model_name"])
            raise pb_utils.TritonModelException(one_line(error)) from None
        return cls(
            pb_utils,
            engine,
            config,
            name=args["model_name"],
            version=args["model_version"],
            stopping_file=_version_folder(args) / STOPPING_NAME,
        )

    def execute(self, requests: Sequence[Any]) -> None:
        """Accept or refuse each request; never raises, returns before any token is computed."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                self._accept(request, sender)
            except MfsError as error:
                self._dispatcher.refuse(sender, error)
            except Exception as error:
                logger.exception("a request could not be read")
                self._dispatcher.refuse(sender, EngineFailedError(one_line(error)))

    def is_ready(self) -> bool:
        """Whether new requests are served: the engine is healthy and not draining."""
        stats = self._engine.stats()
        return stats.is_healthy and not stats.is_draining and not self._is_stopping.is_set()

    def finalize(self) -> None:
        """Finish what runs, answer everything that is open, end the threads."""
        timeout_s = self._config.drain_timeout_s
        logger.info("unloading: at most %g s for running requests", timeout_s)
        for end in (partial(self._engine.drain, timeout_s), self._engine.shutdown):
            try:
                end()
            except Exception:
                logger.exception("the engine did not end cleanly")
        for stream in self._dispatcher.open_streams():
            if not stream.is_attached and stream.gate is not None:
                stream.gate.close()
                continue
            for row in stream.rows:  # behind what is queued: one that ends by itself is left alone
                self._dispatcher.fail(row, EngineUnavailableError("the model was unloaded"))
        self._is_stopping.set()
        self._dispatcher.close()
        for thread in self._threads:
            thread.join(timeout=10)
        self._metrics.set_healthy(False)
        self._metrics.close()
        gc.collect()  # objects of Triton server's in reference cycles, while it is still there

    # -- accepting -------------------------------------------------------------------------------

    def _accept(self, request: Any, sender: Any) -> None:
        arrays = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        if TICKET in arrays:
            self._take_ticket(int(arrays[TICKET].flat[0]), request, sender)
            return
        client_id = request.request_id()
        if is_stop_request(arrays):
            self._control(client_id, sender, "stop", self._cancel)
            return
        tier = read_switch(arrays)
        if tier:
            self._engine.family.tier_index(tier)  # an unknown one is the client's to hear of
            self._control(client_id, sender, "switch_tier", partial(self._switch, tier))
            return
        parameters = json.loads(request.parameters() or "{}")
        check_parameters(parameters, self._config.ignored_parameters)
        rows = parse_request(
            arrays,
            lambda: f"{client_id or 'request'}#{next(self._numbers)}",
            timeout_s=(request.timeout() or read_timeout(parameters)) / 1e6,
            excludes_input=self._config.excludes_input,
        )
        requested = frozenset(request.requested_output_names())
        if requested == {TICKET}:
            self._open_gate(client_id, rows, sender)
            return
        stream = RequestStream(client_id, rows)
        stream.attach(sender, requested)
        self._dispatcher.open(stream)
        self._submit(stream)

    def _submit(self, stream: RequestStream) -> None:
        for row in stream.rows:
            on_event = partial(self._dispatcher.on_event, row)
            try:
                self._engine.submit(row.parsed.prompt, on_event)
            except MfsError as error:
                self._dispatcher.fail(row, error)
            except Exception as error:
                logger.exception("request %s could not be submitted", row.request_id)
                self._dispatcher.fail(row, EngineFailedError(one_line(error)))
        if stream.is_cancelled:  # meanwhile, when the engine did not know it yet
            self._cancel(stream)

    def _control(
        self, client_id: str, sender: Any, name: str, act: Callable[[RequestStream], None]
    ) -> None:
        """`act` on all running requests of `client_id`; an unknown id is not an error."""
        if not client_id:
            pb = self._pb_utils
            text = f"{name}: expected a request id, got none"
            error = pb.TritonError(text, pb.TritonError.INTERNAL)
            sender.send(
                pb.InferenceResponse(output_tensors=[], error=error), flags=self._final_flag
            )
            return
        for stream in self._dispatcher.open_streams():
            if stream.client_id == client_id:
                act(stream)
        sender.send(flags=self._final_flag)

    def _switch(self, tier: str, stream: RequestStream) -> None:
        for row in stream.rows:
            if row.is_open:
                self._engine.switch_tier(row.request_id, tier)

    def _cancel(self, stream: RequestStream) -> None:
        stream.is_cancelled = True
        for row in stream.rows:
            if row.is_open:
                self._engine.cancel(row.request_id)

    # -- requests through an ensemble (`tickets`) ------------------------------------------------

    def _open_gate(self, client_id: str, rows: list[ParsedRow], sender: Any) -> None:
        """First step: keep the request until its ticket comes."""
        gate = TicketGate(sender, self._ticket_response, self._final_flag)
        stream = RequestStream(client_id, rows, gate)
        self._dispatcher.open(stream)
        with self._ticket_lock:
            self._by_ticket[gate.number] = stream
        gate.send()

    def _ticket_response(self, number: int) -> Any:
        tensor = self._pb_utils.Tensor(TICKET, np.array([[number]], np.uint64))
        return self._pb_utils.InferenceResponse(output_tensors=[tensor])

    def _take_ticket(self, number: int, request: Any, sender: Any) -> None:
        """Second step: begin to answer, or learn whether the client is still there."""
        with self._ticket_lock:
            stream = self._by_ticket.get(number)
            if stream is None or stream.gate is None:
                raise InvalidRequestError(f"{TICKET}: expected one that this server gave out")
            is_first = not stream.is_attached
            if is_first:
                stream.attach(sender, frozenset(request.requested_output_names()))
        is_cancelled = request.is_cancelled()
        if not is_first:
            sender.send(flags=self._final_flag)
        stream.gate.give_back()
        if is_first and (is_cancelled or stream.is_cancelled):
            error = RequestCancelledError("the client cancelled the request")
            for row in stream.rows:
                self._dispatcher.fail(row, error)
        elif is_first:
            self._submit(stream)
        elif is_cancelled:
            self._cancel(stream)
        self._dispatcher.release(stream)

    def _send_tickets(self) -> None:
        """Ask after the clients behind ensembles; clear away what Triton server forgot."""
        with self._ticket_lock:
            streams = list(self._by_ticket.values())
        now = time.monotonic()
        server_stops = self._stopping_file is not None and self._stopping_file.exists()
        for stream in streams:
            gate = stream.gate
            assert gate is not None
            if gate.closed_at_s is not None and now - gate.closed_at_s > TICKET_LIFE_S:
                logger.warning("a ticket did not come back in %g s", TICKET_LIFE_S)
                gate.give_up()
                self._dispatcher.release(stream)
            elif stream.is_attached:
                if not server_stops:
                    gate.send()
            elif now - gate.opened_at_s > TICKET_LIFE_S:
                gate.close()
                self._dispatcher.discard(stream)
                self._forget_ticket(stream)

    def _forget_ticket(self, stream: RequestStream) -> None:
        if stream.gate is not None:
            with self._ticket_lock:
                self._by_ticket.pop(stream.gate.number, None)

    # -- periodic work ---------------------------------------------------------------------------

    def _repeat(self, name: str, period_s: float, work: Callable[[], None]) -> None:
        while not self._is_stopping.wait(period_s):
            try:
                work()
            except Exception:
                logger.exception("%s: failed, will be tried again", name)

    def _cancel_abandoned(self) -> None:
        for stream in self._dispatcher.open_streams():
            if not stream.is_cancelled and stream.is_cancelled_by_client():
                self._cancel(stream)

    def _update_metrics(self) -> None:
        self._metrics.update(self._engine.stats(), self._engine.limits.max_num_seqs)


def start_engine(config: ServeConfig) -> Any:
    """The `AsyncEngine` of an engine folder, started."""
    from mfs_trt.serving.async_engine import AsyncEngine
    from mfs_trt.serving.core import load_core

    core = load_core(
        config.engine,
        max_step_s=config.max_step_ms / 1000 or None,
        tier_policy=config.tier_policy,
    )
    engine = AsyncEngine(core, max_queue_size=config.max_queue_size)
    engine.start()
    return engine


def _version_folder(args: dict[str, str]) -> Path:
    return Path(args["model_repository"]) / args["model_version"]


def _load_config(args: dict[str, str]) -> ServeConfig:
    parameters = json.loads(args["model_config"]).get("parameters", {})
    config, ignored = load_serve_config(
        _version_folder(args),
        {key: value.get("string_value", "") for key, value in parameters.items()},
    )
    if ignored:
        logger.warning("config.pbtxt: parameters without effect here: %s", ", ".join(ignored))
    return config
