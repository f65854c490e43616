"""Stand-ins for Triton server's `pb_utils` and for an engine that the test itself steps."""

import json
import threading
import time
import types
from dataclasses import dataclass, field

import numpy as np

from mfs_trt.errors import EngineUnavailableError, RequestCancelledError
from mfs_trt.request import FinishReason, PromptRequest, TokenEvent

FINAL = 1


class FakeTensor:
    def __init__(self, name, array):
        self._name, self._array = name, np.asarray(array)

    def name(self):
        return self._name

    def as_numpy(self):
        return self._array


class FakeError(Exception):
    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, CANCELLED = range(7)

    def __init__(self, message, code=UNKNOWN):
        super().__init__(message)
        self.message, self.code = message, code


@dataclass
class FakeResponse:
    output_tensors: list = field(default_factory=list)
    error: FakeError | None = None

    def __getitem__(self, name):
        return next(t.as_numpy() for t in self.output_tensors if t.name() == name)

    def __contains__(self, name):
        return any(t.name() == name for t in self.output_tensors)


class FakeSender:
    """Keeps what is sent; refuses use after the final flag, as Triton server does."""

    def __init__(self):
        self.responses, self.is_final, self.is_client_gone = [], False, False
        self.fail_next = False
        self._done = threading.Event()

    def send(self, response=None, flags=0):
        assert not self.is_final, "sent after the final flag"
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("the response could not be sent")
        if response is not None:
            self.responses.append(response)
        if flags == FINAL:
            self.is_final = True
            self._done.set()

    def is_cancelled(self):
        assert not self.is_final, "asked after the final flag"
        return self.is_client_gone

    def finish(self, timeout_s=5.0):
        assert self._done.wait(timeout_s), "no final response"
        return self.responses


class FakeRequest:
    """`tensors` maps names to arrays [batch, …]; `outputs` None asks for everything."""

    def __init__(self, tensors, *, request_id="", outputs=None, parameters=None, timeout_us=0):
        self._tensors = [FakeTensor(name, array) for name, array in tensors.items()]
        self._id, self._parameters, self._timeout_us = request_id, parameters or {}, timeout_us
        self._outputs = outputs
        self.sender, self.is_client_gone = FakeSender(), False

    def inputs(self):
        return self._tensors

    def request_id(self):
        return self._id

    def parameters(self):
        return json.dumps(self._parameters)

    def timeout(self):
        return self._timeout_us

    def requested_output_names(self):
        if self._outputs is not None:
            return list(self._outputs)
        from mfs_trt.serving.triton_spec import OUTPUTS

        return [spec.name for spec in OUTPUTS]

    def get_response_sender(self):
        return self.sender

    def is_cancelled(self):
        return self.is_client_gone


class FakeMetric:
    def __init__(self, labels, buckets=None):
        self.labels, self.buckets, self.value, self.observed = labels, buckets, 0.0, []

    def set(self, value):
        self.value = value

    def increment(self, value):
        self.value += value

    def observe(self, value):
        self.observed.append(value)


class FakePbUtils:
    """What the worker uses of `triton_python_backend_utils`."""

    TRITONSERVER_RESPONSE_COMPLETE_FINAL = FINAL
    Tensor, TritonError, InferenceResponse = FakeTensor, FakeError, FakeResponse

    class TritonModelException(Exception):
        pass

    def __init__(self, has_metrics=True):
        self.metrics = {}
        registry = self.metrics

        class MetricFamily:
            GAUGE, COUNTER, HISTOGRAM = "gauge", "counter", "histogram"

            def __init__(self, name, description, kind):
                if not has_metrics:
                    raise RuntimeError("metrics not supported")
                self.name, self.kind = name, kind

            def Metric(self, labels, buckets=None):
                metric = FakeMetric(labels, buckets)
                registry[self.name, tuple(sorted(labels.items()))] = metric
                return metric

        self.MetricFamily = MetricFamily

    def metric(self, name, **labels):
        all_labels = {"model": "family", "version": "1", **labels}
        return self.metrics.get((name, tuple(sorted(all_labels.items()))), FakeMetric({}))


class CharTokenizer:
    """One token per character."""

    def encode(self, text, add_special_tokens=True):
        return [ord(c) for c in text]

    def decode(self, ids, skip_special_tokens=True):
        return "".join(chr(i) for i in ids)


class FakeAsyncEngine:
    """Keeps what is submitted; the test sends the events."""

    def __init__(self):
        self.tokenizer = CharTokenizer()
        self.limits = types.SimpleNamespace(max_num_seqs=8)
        self.requests: list[PromptRequest] = []
        self.cancelled: list[str] = []
        self.submit_error: Exception | None = None
        self.is_healthy, self.is_draining, self.is_shut_down = True, False, False
        self.num_output_tokens = 0
        self._callbacks = {}
        self._arrived = threading.Condition()

    def submit(self, request, on_event):
        if self.submit_error is not None:
            raise self.submit_error
        with self._arrived:
            self.requests.append(request)
            self._callbacks[request.request_id] = on_event
            self._arrived.notify_all()

    def cancel(self, request_id):
        self.cancelled.append(request_id)
        error = RequestCancelledError(f"request {request_id} was cancelled")
        return self._end(request_id, error)

    def _end(self, request_id, error):
        on_event = self._callbacks.pop(request_id, None)
        if on_event is not None:
            on_event(TokenEvent(request_id, 0, error=error))
        return on_event is not None

    def stats(self):
        return types.SimpleNamespace(
            num_waiting=1,
            num_running=2,
            num_frames_total=100,
            num_frames_used=25,
            block_size=16,
            num_steps_total=7,
            num_preemptions_total=3,
            num_rows_by_segment=(30, 10),
            num_reused_tokens_by_segment=(16, 0),
            draft_tokens_by_tier={"small": 8},
            accepted_draft_tokens_by_tier={"small": 6},
            num_prompt_tokens_total=11,
            num_output_tokens_total=self.num_output_tokens,
            num_requests_finished_total=5,
            num_requests_failed_total=2,
            output_tokens_by_tier={"small": self.num_output_tokens},
            num_tier_switches={("cascade", "up"): 4},
            is_healthy=self.is_healthy,
            is_draining=self.is_draining,
        )

    def drain(self, timeout_s):
        self.is_draining = True

    def shutdown(self):
        self.is_shut_down = True
        for request_id in list(self._callbacks):
            self._end(request_id, EngineUnavailableError("the server is shutting down"))

    # -- for the test ----------------------------------------------------------------------------

    def emit(self, text, *, ends=None, request=-1, sequence_index=0, log_probs=(), logits=None):
        """One event for a submitted request: a token per character; `ends` is a finish reason."""
        prompt = self.requests[request]
        self._callbacks[prompt.request_id](
            TokenEvent(
                prompt.request_id,
                sequence_index,
                token_ids=tuple(ord(c) for c in text),
                text=text,
                log_probs=log_probs,
                logits=logits,
                cumulative_log_prob=float(sum(log_probs)),
                finish_reason=FinishReason(ends) if ends else None,
                tier="small",
                num_prompt_tokens=3,
            )
        )

    def fail(self, error, request=-1):
        self._end(self.requests[request].request_id, error)


def wait_until(condition, timeout_s=5.0):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "the condition did not come true"
        time.sleep(0.002)
