"""What a Triton request says: arrays → `PromptRequest` and how its answer is wanted.

Pure and in numpy; the table in `triton_spec` decides what each tensor means. Arrays are as Triton
server hands them over: [batch, *dims], strings as `bytes` objects.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from mfs_trt.errors import InvalidRequestError, UnsupportedFieldError
from mfs_trt.request import PromptRequest
from mfs_trt.sampling_params import SamplingParams
from mfs_trt.serving.triton_spec import INPUTS, InputSpec, Use

_SPECS = {spec.name: spec for spec in INPUTS}

# Request parameters that Triton server or its clients add by themselves.
SERVER_PARAMETERS = (
    "id",
    "triton_*",
    "sequence_*",
    "priority",
    "timeout",
    "binary_data_output",
    "headers",
)


@dataclass(frozen=True)
class ResponseOptions:
    """How one prompt's answer is wanted."""

    is_streaming: bool = False
    excludes_input: bool = False  # streamed answers never carry the prompt
    wants_perf_metrics: bool = False
    wants_num_input_tokens: bool = False
    wants_num_output_tokens: bool = False
    return_log_probs: bool = False
    return_generation_logits: bool = False


@dataclass(frozen=True)
class ParsedRow:
    """One row of a request's batch."""

    prompt: PromptRequest
    options: ResponseOptions


def is_stop_request(arrays: Mapping[str, np.ndarray]) -> bool:
    """Whether the request asks to cancel the running requests of its own id."""
    return "stop" in arrays and bool(np.any(arrays["stop"]))


def read_switch(arrays: Mapping[str, np.ndarray]) -> str:
    """The tier that the running requests of the request's own id are to move to; "": no switch.

    Raises `InvalidRequestError`.
    """
    if "switch_tier" not in arrays:
        return ""
    return _decode("switch_tier", arrays["switch_tier"].flat[0])


def parse_request(
    arrays: Mapping[str, np.ndarray],
    new_request_id: Callable[[], str],
    *,
    timeout_s: float | None = None,
    excludes_input: bool = False,
) -> list[ParsedRow]:
    """The rows of one request.

    `timeout_s` is the request's own Triton timeout; the earlier of it and `deadline_ms` counts.
    `excludes_input` is what a request gets that does not set `exclude_input_in_output`. Raises
    `InvalidRequestError` or `UnsupportedFieldError` naming the tensor.
    """
    for name in arrays:
        if name not in _SPECS:
            raise UnsupportedFieldError(f"{name}: not an input of this model")
    if not arrays:
        raise InvalidRequestError("expected one of text_input, messages, input_ids; got no input")
    num_rows = max(len(array) for array in arrays.values())
    for name, array in arrays.items():
        if len(array) != num_rows:
            raise InvalidRequestError(f"{name}: expected {num_rows} rows, got {len(array)}")
    return [
        _parse_row(
            {name: array[row] for name, array in arrays.items()},
            new_request_id(),
            timeout_s,
            excludes_input,
        )
        for row in range(num_rows)
    ]


def check_parameters(parameters: Mapping[str, Any], ignored: Sequence[str] = ()) -> None:
    """Refuse request parameters that nobody reads, so that a misspelt input is not lost in silence.

    `ignored` are further patterns to let pass. Raises `UnsupportedFieldError` naming the parameter.
    """
    for name in parameters:
        if any(fnmatchcase(name, pattern) for pattern in (*SERVER_PARAMETERS, *ignored)):
            continue
        if name in _SPECS:
            raise UnsupportedFieldError(
                f"{name}: expected an input tensor, got a request parameter"
            )
        raise UnsupportedFieldError(f"{name}: neither an input nor a known request parameter")


def read_timeout(parameters: Mapping[str, Any]) -> int:
    """Microseconds of the parameter `timeout`, as a body of HTTP generate may carry it; 0: none.

    Raises `InvalidRequestError`.
    """
    timeout = parameters.get("timeout", 0)
    if not isinstance(timeout, int) or timeout < 0:
        raise InvalidRequestError(f"timeout: expected microseconds, at least 0, got {timeout!r}")
    return timeout


def _parse_row(
    row: Mapping[str, np.ndarray], request_id: str, timeout_s: float | None, excludes_input: bool
) -> ParsedRow:
    groups: dict[Use, dict[str, Any]] = {use: {} for use in Use}
    origins: dict[str, str] = {}  # field → tensor that set it
    for name, array in row.items():
        spec = _SPECS[name]
        if spec.use is Use.NO_EFFECT:
            continue
        if spec.use is Use.REFUSED:
            _refuse_unless_neutral(spec, array)
            continue
        value = _read_value(spec, array)
        group = groups[spec.use]
        if spec.field in group and group[spec.field] != value:
            raise InvalidRequestError(
                f"{name}: expected the value of {origins[spec.field]}, {group[spec.field]}, "
                f"got {value}"
            )
        group[spec.field] = value
        origins[spec.field] = name
    params = SamplingParams(**groups[Use.SAMPLING])
    options = groups[Use.OPTION]
    options.pop("stop", None)
    options.pop("switch_tier", None)
    prompt = PromptRequest(
        request_id=request_id,
        params=params,
        deadline_s=_deadline_s(options.pop("deadline_ms", 0), timeout_s),
        **_read_prompt(options),
        **{name: value for name, value in groups[Use.REQUEST].items() if value != ""},
    )
    options.setdefault("excludes_input", excludes_input)
    return ParsedRow(
        prompt,
        ResponseOptions(
            return_log_probs=params.return_log_probs,
            return_generation_logits=params.return_generation_logits,
            **options,
        ),
    )


def _read_prompt(options: dict[str, Any]) -> dict[str, Any]:
    """Take the prompt's fields out of `options`: exactly one of text, messages and token ids."""
    text = options.pop("prompt", None)
    messages = options.pop("messages", "")
    token_ids = options.pop("token_ids", ())
    length = options.pop("num_token_ids", None)
    if token_ids and length is not None:
        if not 1 <= length <= len(token_ids):
            raise InvalidRequestError(
                f"input_lengths: expected between 1 and {len(token_ids)} (input_ids), got {length}"
            )
        token_ids = token_ids[:length]
    given = [
        name
        for name, is_set in (
            ("text_input", bool(text)),
            ("messages", bool(messages)),
            ("input_ids", bool(token_ids)),
        )
        if is_set
    ]
    if len(given) > 1:
        raise InvalidRequestError(f"{' and '.join(given)}: expected exactly one of them")
    if messages:
        return {"messages": _read_messages(messages)}
    if token_ids:
        return {"token_ids": token_ids}
    if text is None:
        raise InvalidRequestError("expected one of text_input, messages, input_ids; got none")
    return {"prompt": text}


def _read_messages(text: str) -> list[dict[str, str]]:
    expected = 'messages: expected a JSON list of {"role": "…", "content": "…"}'
    try:
        messages = json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidRequestError(f"{expected}, got invalid JSON: {error}") from None
    is_valid = isinstance(messages, list) and messages
    for message in messages if is_valid else ():
        if not isinstance(message, dict) or not all(
            isinstance(message.get(key), str) for key in ("role", "content")
        ):
            is_valid = False
    if not is_valid:
        raise InvalidRequestError(f"{expected}, got {text[:200]!r}")
    return messages


def _deadline_s(deadline_ms: int, timeout_s: float | None) -> float | None:
    if deadline_ms < 0:
        raise InvalidRequestError(
            f"deadline_ms: expected at least 0 (0 is none), got {deadline_ms}"
        )
    given = [s for s in (deadline_ms / 1000, timeout_s) if s]
    return min(given, default=None)


def _refuse_unless_neutral(spec: InputSpec, array: np.ndarray) -> None:
    for value in array.flat:
        value = value.decode(errors="replace") if isinstance(value, bytes) else value
        if value not in spec.neutral:
            expected = " or ".join(repr(n) for n in spec.neutral) or "to be absent or empty"
            got = f"a {'×'.join(map(str, array.shape))} tensor" if array.size > 1 else repr(value)
            raise UnsupportedFieldError(
                f"{spec.name}: {spec.reason}; expected {expected}, got {got}"
            )


def _read_value(spec: InputSpec, array: np.ndarray) -> Any:
    """One row of a tensor as the Python value that its field wants."""
    if spec.dtype == "STRING":
        texts = [_decode(spec.name, value) for value in array.flat]
        # Lists of one batch are padded to equal length with empty words.
        return texts[0] if spec.dims == (1,) else tuple(text for text in texts if text)
    if spec.dims == (2, -1):
        return read_word_list(spec.name, array)
    if spec.dims == (-1,):
        return array.tolist()
    value = array.flat[0]
    if spec.dtype == "FP32":
        return float(str(value))  # the decimal that the client wrote: 0.7, not 0.699999988…
    return value.item()


def read_word_list(name: str, array: np.ndarray) -> tuple[tuple[int, ...], ...]:
    """Words from TensorRT-LLM's layout [2, n]: row 0 token ids, row 1 cumulative end offsets,
    padded with -1.
    """
    token_ids, offsets = array[0].tolist(), array[1].tolist()
    words = []
    start = 0
    for end in offsets:
        if end < 0:
            break
        if not start <= end <= len(token_ids):
            raise InvalidRequestError(
                f"{name}: expected ascending end offsets up to {len(token_ids)}, got {offsets}"
            )
        if end > start:
            words.append(tuple(token_ids[start:end]))
        start = end
    return tuple(words)


def _decode(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return bytes(value).decode()
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"{name}: expected UTF-8 text, got {error}") from None
