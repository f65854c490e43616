"""A started AsyncEngine over a real tiny core, with a gate before its steps."""

import threading
from collections.abc import Callable

from mfs_trt.request import PromptRequest, TokenEvent
from mfs_trt.sampling_params import SamplingParams
from mfs_trt.serving.async_engine import AsyncEngine
from mfs_trt.serving.core import EngineCore
from tiny import run_alone, tiny_engine, tiny_family, tiny_model

MODEL = tiny_model(tiny_family((1, 2, 4)))
PROMPT = [3, 1, 4, 1, 5]
WAIT_S = 20.0  # until something that must happen counts as missing


class Inbox:
    """Collects one request's events; `ended` is set by the last one."""

    def __init__(self, num_sequences: int = 1) -> None:
        self.events: list[TokenEvent] = []
        self.threads: set[str] = set()
        self.ended = threading.Event()
        self.has_token = threading.Event()
        self._num_open = num_sequences

    def __call__(self, event: TokenEvent) -> None:
        self.events.append(event)
        assert not self.ended.is_set(), "an event after the last one"
        self.threads.add(threading.current_thread().name)
        self._num_open -= event.finish_reason is not None
        if event.token_ids:
            self.has_token.set()
        if event.error is not None or self._num_open == 0:
            self.ended.set()

    def wait(self) -> "Inbox":
        assert self.ended.wait(WAIT_S), "the request was never ended"
        return self

    @property
    def token_ids(self) -> list[int]:
        return [t for e in self.events for t in e.token_ids]

    @property
    def error(self) -> Exception | None:
        return self.events[-1].error


class Gate:
    """Holds the engine inside `execute` while it is closed."""

    def __init__(self, core: EngineCore) -> None:
        self._execute = core.engine.execute
        self._is_open = threading.Event()
        self._is_open.set()
        self.entered = threading.Event()
        core.engine.execute = self._wait

    def _wait(self, step):
        self.entered.set()
        assert self._is_open.wait(WAIT_S)
        return self._execute(step)

    def close(self) -> None:
        self.entered.clear()
        self._is_open.clear()

    def open(self) -> None:
        self._is_open.set()


class Served:
    """A started engine over a real core, with a gate before its steps."""

    def __init__(self, *, max_queue_size: int = 64, **engine_settings) -> None:
        self.core = EngineCore(tiny_engine(MODEL, **engine_settings), tokenizer=None)
        self.gate = Gate(self.core)
        self.engine = AsyncEngine(self.core, max_queue_size)
        self.engine.start()
        self.threads = [self.engine._engine_thread, self.engine._response_thread]

    def submit(
        self, name: str, *, on_event: Callable | None = None, n: int = 1, max_tokens=4, **fields
    ) -> Inbox:
        inbox = Inbox(n)
        sampled = {"temperature": 1.0, "seed": 1} if n > 1 else {}
        params = SamplingParams(max_tokens=max_tokens, end_id=-1, n=n, **sampled)
        request = PromptRequest(name, params, token_ids=PROMPT, **fields)
        self.engine.submit(request, on_event or inbox)
        return inbox

    def hold_a_step(self) -> Inbox:
        """Leave a request's step waiting at the gate; returns its inbox."""
        self.gate.close()
        inbox = self.submit("held")
        assert self.gate.entered.wait(WAIT_S)
        return inbox

    def settle(self) -> None:
        """Run a request to its end: what was aborted before it is gone."""
        self.gate.open()
        assert self.submit("settle").wait().error is None


def alone(tier: str = "t2", max_tokens: int = 4) -> list[int]:
    return run_alone(MODEL, PROMPT, tier, SamplingParams(max_tokens=max_tokens, end_id=-1))
