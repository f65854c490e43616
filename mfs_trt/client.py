"""Client: generate, stream and cancel over gRPC, against a server that `mfs-trt serve` started.

Every request has a stream of its own, so requests of one `Client` from many threads do not wait for
each other.
"""

import json
import re
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor

from mfs_trt import errors
from mfs_trt.sampling_params import SamplingParams

DEFAULT_URL = "127.0.0.1:8001"

# Field of SamplingParams → tensor of the models `ensemble` and `family`, and its type.
PARAM_TENSORS = {
    "max_tokens": ("max_tokens", "INT32"),
    "min_tokens": ("min_tokens", "INT32"),
    "temperature": ("temperature", "FP32"),
    "top_k": ("top_k", "INT32"),
    "top_p": ("top_p", "FP32"),
    "min_p": ("min_p", "FP32"),
    "n": ("num_return_sequences", "INT32"),
    "seed": ("seed", "UINT64"),
    "repetition_penalty": ("repetition_penalty", "FP32"),
    "presence_penalty": ("presence_penalty", "FP32"),
    "frequency_penalty": ("frequency_penalty", "FP32"),
    "stop": ("stop_words", "BYTES"),
    "bad_words": ("bad_words", "BYTES"),
    "end_id": ("end_id", "INT32"),
    "ignore_eos": ("ignore_eos", "BOOL"),
    "return_log_probs": ("return_log_probs", "BOOL"),
    "return_generation_logits": ("return_generation_logits", "BOOL"),
}

_NUMPY_DTYPES = {
    "INT32": np.int32,
    "INT64": np.int64,
    "UINT64": np.uint64,
    "FP32": np.float32,
    "BOOL": np.bool_,
}
_STATUS_ERRORS = {
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidRequestError,
    grpc.StatusCode.UNIMPLEMENTED: errors.UnsupportedFieldError,
    grpc.StatusCode.CANCELLED: errors.RequestCancelledError,
    grpc.StatusCode.UNAVAILABLE: errors.EngineUnavailableError,
    grpc.StatusCode.INTERNAL: errors.EngineFailedError,
}


@dataclass(frozen=True)
class Chunk:
    """What one response brought for one sequence; only the last has a `finish_reason`."""

    text: str
    sequence_index: int = 0
    num_new_tokens: int = 0
    log_probs: tuple[float, ...] = ()
    logits: np.ndarray | None = None  # [num_new_tokens, vocab_size] float32
    cumulative_log_prob: float = 0.0
    tier: str = ""
    finish_reason: str = ""


@dataclass
class Completion:
    """One whole sequence."""

    text: str = ""
    num_tokens: int = 0
    log_probs: list[float] = field(default_factory=list)
    cumulative_log_prob: float = 0.0
    tier: str = ""
    finish_reason: str = ""


class Client:
    """Talks to one server. `model` is `ensemble` or `family`. Thread-safe."""

    def __init__(self, url: str = DEFAULT_URL, model: str = "ensemble"):
        self.url = url
        self.model = model
        self._channel = grpc.insecure_channel(
            url,
            options=[("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)],
        )
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._channel.close()

    def is_ready(self) -> bool:
        """Whether the server answers and every model is ready."""
        try:
            return self._stub.ServerReady(service_pb2.ServerReadyRequest(), timeout=5).ready
        except grpc.RpcError:
            return False

    def generate(
        self, prompt: str | None = None, params: SamplingParams | None = None, **more: Any
    ) -> list[Completion]:
        """Wait for the whole answer: a completion per sequence. Arguments, errors: as `stream`."""
        params = params or SamplingParams()
        completions = [Completion() for _ in range(params.n)]
        for chunk in self._chunks(prompt, params, is_streaming=False, **more):
            completion = completions[chunk.sequence_index]
            completion.text += chunk.text
            completion.num_tokens += chunk.num_new_tokens
            completion.log_probs += chunk.log_probs
            completion.cumulative_log_prob = chunk.cumulative_log_prob
            completion.tier, completion.finish_reason = chunk.tier, chunk.finish_reason
        return completions

    def stream(
        self, prompt: str | None = None, params: SamplingParams | None = None, **more: Any
    ) -> Iterator[Chunk]:
        """Chunks as they come. Closing the iterator cancels the request.

        `more`: `messages` (chat turns, in place of `prompt`), `tier`, `min_tier`, `max_tier`,
        `tier_policy`, `cascade_threshold`, `priority`, `deadline_ms`, `request_id`, `draft_tier` (a
        name or a tuple of them, from low to high), `num_speculative_tokens`, `reuse_prefix`,
        `cache_salt`. Raises the error that the server names, one of `mfs_trt.errors`.
        """
        yield from self._chunks(prompt, params or SamplingParams(), is_streaming=True, **more)

    def cancel(self, request_id: str) -> None:
        """Cancel every running request of `request_id`; an unknown id is not an error."""
        request = self._request(request_id, {"text_input": "", "max_tokens": 1, "stop": True})
        for _ in self._responses(request):
            pass

    def switch_tier(self, request_id: str, tier: str) -> None:
        """Run every running request of `request_id` at another tier from its next token on."""
        tensors = {"text_input": "", "max_tokens": 1, "switch_tier": tier}
        for _ in self._responses(self._request(request_id, tensors)):
            pass

    # -- one request -----------------------------------------------------------------------------

    def _chunks(
        self,
        prompt: str | None,
        params: SamplingParams,
        *,
        is_streaming: bool,
        messages: Sequence[dict[str, str]] | None = None,
        request_id: str = "",
        **routing: Any,
    ) -> Iterator[Chunk]:
        if (prompt is None) == (messages is None):
            raise errors.InvalidRequestError("expected either a prompt or messages")
        unknown = sorted(set(routing) - set(_ROUTING_FIELDS))
        if unknown:
            raise TypeError(f"unknown arguments: {', '.join(unknown)}")
        tensors: dict[str, Any] = dict(_param_tensors(params))
        if messages is not None:
            tensors["messages"] = json.dumps(list(messages))
        else:
            tensors["text_input"] = prompt
        tensors |= {name: value for name, value in routing.items() if value is not None}
        tensors |= {
            "stream": is_streaming,
            "exclude_input_in_output": True,
            "return_num_output_tokens": True,
        }
        request = self._request(request_id or uuid.uuid4().hex, tensors)
        for name in _CHUNK_OUTPUTS:  # without them Triton server would copy every output
            request.outputs.add(name=name)
        for response in self._responses(request):
            outputs = _read_outputs(response)
            if "text_output" in outputs:
                yield _chunk(outputs)

    def _request(self, request_id: str, tensors: dict[str, Any]) -> Any:
        request = service_pb2.ModelInferRequest(model_name=self.model, id=request_id)
        for name, value in tensors.items():
            dtype = _DTYPES[name]
            values = value if isinstance(value, tuple) else (value,)
            request.inputs.add(name=name, datatype=dtype, shape=[1, len(values)])
            request.raw_input_contents.append(_to_bytes(values, dtype))
        return request

    def _responses(self, request: Any) -> Iterator[Any]:
        call = self._stub.ModelStreamInfer(iter([request]))
        try:
            for message in call:
                if message.error_message:
                    raise server_error(message.error_message)
                yield message.infer_response
        except grpc.RpcError as error:
            raise server_error(error.details() or "", error.code()) from None
        except GeneratorExit:  # the caller wants no more
            call.cancel()
            raise


_CHUNK_OUTPUTS = (
    "text_output",
    "sequence_index",
    "num_output_tokens",
    "output_log_probs",
    "cum_log_probs",
    "generation_logits",
    "tier_used",
    "finish_reason",
)
_ROUTING_FIELDS = {
    "tier": "BYTES",
    "min_tier": "BYTES",
    "max_tier": "BYTES",
    "tier_policy": "BYTES",
    "cascade_threshold": "FP32",
    "priority": "INT32",
    "deadline_ms": "INT32",
    "draft_tier": "BYTES",
    "num_speculative_tokens": "INT32",
    "reuse_prefix": "BOOL",
    "cache_salt": "BYTES",
}
_DTYPES = {
    **dict(PARAM_TENSORS.values()),
    **_ROUTING_FIELDS,
    "text_input": "BYTES",
    "messages": "BYTES",
    "stream": "BOOL",
    "stop": "BOOL",
    "switch_tier": "BYTES",
    "exclude_input_in_output": "BOOL",
    "return_num_output_tokens": "BOOL",
}


def server_error(text: str, code: grpc.StatusCode | None = None) -> errors.MfsError:
    """The error that a server's message names (`ClassName: …`), else the one that its code stands
    for.
    """
    match = re.search(r"\b([A-Z]\w+Error): (.*)", text, re.DOTALL)
    named = getattr(errors, match[1], None) if match else None
    if named is not None and match is not None:
        return named(match[2])
    kind = _STATUS_ERRORS.get(code, errors.ServerError) if code else errors.ServerError
    return kind(text or str(code))


def _param_tensors(params: SamplingParams) -> Iterator[tuple[str, Any]]:
    """Tensors for the fields that differ from their default, and `max_tokens` always."""
    for spec in fields(SamplingParams):
        value = getattr(params, spec.name)
        if value != spec.default or spec.name == "max_tokens":
            yield PARAM_TENSORS[spec.name][0], value


def _to_bytes(values: Sequence[Any], dtype: str) -> bytes:
    if dtype == "BYTES":
        array = np.array([value.encode() for value in values], dtype=np.object_)
        return serialize_byte_tensor(array).item() if len(values) else b""
    return np.array(values, _NUMPY_DTYPES[dtype]).tobytes()


def _read_outputs(response: Any) -> dict[str, np.ndarray]:
    outputs = {}
    for tensor, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        if tensor.datatype == "BYTES":
            array = deserialize_bytes_tensor(raw)
        else:
            array = np.frombuffer(raw, _NUMPY_DTYPES[tensor.datatype])
        outputs[tensor.name] = array.reshape(tuple(tensor.shape))
    return outputs


def _chunk(outputs: dict[str, np.ndarray]) -> Chunk:
    def first(name: str, default: Any) -> Any:
        return outputs[name].flat[0] if name in outputs else default

    logits = outputs.get("generation_logits")
    return Chunk(
        text=first("text_output", b"").decode(),
        sequence_index=int(first("sequence_index", 0)),
        num_new_tokens=int(first("num_output_tokens", 0)),
        log_probs=tuple(outputs["output_log_probs"].flat) if "output_log_probs" in outputs else (),
        logits=logits[0, 0] if logits is not None else None,
        cumulative_log_prob=float(first("cum_log_probs", 0.0)),
        tier=first("tier_used", b"").decode(),
        finish_reason=first("finish_reason", b"").decode(),
    )
