"""One request over one gRPC stream, by NVIDIA's client, with everything that came back."""

import queue
import threading
import time
from dataclasses import dataclass, field

import numpy as np
import tritonclient.grpc as grpcclient
from tritonclient.utils import np_to_triton_dtype

DTYPES = {
    "max_tokens": np.int32, "min_tokens": np.int32, "top_k": np.int32, "end_id": np.int32,
    "top_p": np.float32, "temperature": np.float32, "repetition_penalty": np.float32,
    "presence_penalty": np.float32, "frequency_penalty": np.float32, "seed": np.uint64,
    "num_return_sequences": np.int32, "priority": np.int32, "deadline_ms": np.int32,
    "input_ids": np.int32, "input_lengths": np.int32, "request_output_len": np.int32,
    "num_speculative_tokens": np.int32, "cascade_threshold": np.float32,
}  # fmt: skip


def tensors(fields: dict) -> list[grpcclient.InferInput]:
    """Each field as a batch of one: [1, number of values]; an array is taken as it is."""
    inputs = []
    for name, value in fields.items():
        values = value if isinstance(value, list | tuple) else [value]
        if isinstance(value, np.ndarray):
            array = value
        elif isinstance(values[0], str):
            array = np.array([[v.encode() for v in values]], dtype=np.object_)
        elif isinstance(values[0], bool):
            array = np.array([values], dtype=bool)
        else:
            array = np.array([values], dtype=DTYPES[name])
        tensor = grpcclient.InferInput(name, array.shape, np_to_triton_dtype(array.dtype))
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    return inputs


@dataclass
class Stream:
    """Sends at once; `finish()` waits for the final response. Errors are kept, not raised."""

    port: int
    fields: dict
    model: str = "ensemble"
    request_id: str = ""
    outputs: tuple[str, ...] = ("text_output",)
    timeout_us: int | None = None  # Triton's own request timeout
    chunks: list[str] = field(default_factory=list)
    results: list = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    error: str | None = None

    def __post_init__(self):
        self._done, self._first = threading.Event(), threading.Event()
        self._events: queue.SimpleQueue = queue.SimpleQueue()
        self.client = grpcclient.InferenceServerClient(f"127.0.0.1:{self.port}")
        self.client.start_stream(self._on_response)
        self.started_s = time.monotonic()
        self.client.async_stream_infer(
            self.model,
            tensors(self.fields),
            request_id=self.request_id,
            outputs=[grpcclient.InferRequestedOutput(name) for name in self.outputs],
            enable_empty_final_response=True,
            timeout=self.timeout_us,
        )

    def _on_response(self, result, error):
        self.times_s.append(time.monotonic())
        if error is not None:
            self.error = str(error)
            self._first.set()
            self._done.set()
            return
        if result.as_numpy(self.outputs[0]) is not None:
            self.results.append(result)
            if "text_output" in self.outputs:
                texts = result.as_numpy("text_output").reshape(-1)
                self.chunks.append(texts[0].decode())
            self._first.set()
        if result.get_response().parameters["triton_final_response"].bool_param:
            self._first.set()
            self._done.set()

    def wait_first(self, timeout_s: float = 60) -> "Stream":
        assert self._first.wait(timeout_s), "no response"
        return self

    def finish(self, timeout_s: float = 120) -> "Stream":
        assert self._done.wait(timeout_s), "the stream did not end"
        self.client.stop_stream()
        self.client.close()
        return self

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def disconnect(self) -> None:
        """Go away in mid-stream, as a client that crashed."""
        self.client.stop_stream(cancel_requests=True)
        self.client.close()

    @property
    def text(self) -> str:
        assert self.error is None, self.error
        return "".join(self.chunks)

    def values(self, output: str) -> list:
        """All values of an output over the responses, flattened."""
        arrays = [r.as_numpy(output) for r in self.results]
        return [v for a in arrays if a is not None for v in a.reshape(-1).tolist()]


class Burst:
    """Many streamed requests to `ensemble` over one gRPC stream, sent at once."""

    def __init__(self, port: int, requests: list[dict]) -> None:
        self.texts: dict[int, str] = {}  # of those that finished, by place in `requests`
        self.errors: list[str] = []
        self._chunks = [""] * len(requests)
        self._is_closed = False
        self._changed = threading.Condition()
        self._client = grpcclient.InferenceServerClient(f"127.0.0.1:{port}")
        self._client.start_stream(self._on_response)
        for i, fields in enumerate(requests):
            self._client.async_stream_infer(
                "ensemble",
                tensors({"stream": True, **fields}),
                request_id=str(i),
                outputs=[grpcclient.InferRequestedOutput("text_output")],
                enable_empty_final_response=True,
            )

    def _on_response(self, result, error):
        with self._changed:
            if self._is_closed:
                return
            if error is not None:
                self.errors.append(str(error))
            else:
                response = result.get_response()
                texts = result.as_numpy("text_output")
                if texts is not None:
                    self._chunks[int(response.id)] += texts.reshape(-1)[0].decode()
                if response.parameters["triton_final_response"].bool_param:
                    self.texts[int(response.id)] = self._chunks[int(response.id)]
            self._changed.notify_all()

    def wait(self, *, num_errors: int = 0, num_texts: int = 0, timeout_s: float = 60) -> None:
        """Until so many failed and so many finished."""
        with self._changed:
            assert self._changed.wait_for(
                lambda: len(self.errors) >= num_errors and len(self.texts) >= num_texts, timeout_s
            ), f"{len(self.errors)} errors, {len(self.texts)} texts"

    def finish(self, timeout_s: float = 120) -> "Burst":
        with self._changed:
            assert self._changed.wait_for(
                lambda: len(self.errors) + len(self.texts) == len(self._chunks), timeout_s
            ), f"{len(self.errors)} errors, {len(self.texts)} texts of {len(self._chunks)}"
        self.close()
        return self

    def close(self) -> None:
        """Go away; what still runs is cancelled."""
        self._is_closed = True
        self._client.stop_stream(cancel_requests=True)
        self._client.close()
