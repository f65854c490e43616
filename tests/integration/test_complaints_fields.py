"""What people complained of in fields that get lost, and what HTTP says of wrong ones."""

import json

import numpy as np
import pytest

from mfs_trt.errors import MfsError, UnsupportedFieldError
from mfs_trt.serving.triton_requests import parse_request
from mfs_trt.serving.triton_spec import BLS, ENSEMBLE, INPUTS, TENSORRT_LLM, TICKET, Use
from probes import generate_stream, post
from streams import Stream

pytestmark = pytest.mark.triton

PROMPT = "the river moves"


_NUMPY = {
    "STRING": np.object_, "INT32": np.int32, "INT64": np.int64, "UINT64": np.uint64,
    "UINT8": np.uint8, "FP32": np.float32, "FP16": np.float16, "BOOL": np.bool_,
}  # fmt: skip
_BY_DTYPE = {"STRING": b"x", "BOOL": True, "FP32": 0.5, "FP16": 0.5}
_VALUES = {
    "messages": [b'[{"role": "user", "content": "x"}]'],
    "input_ids": [7, 8, 9],
    "input_lengths": [1],
    "stop_words_list": [[5, 6], [1, 2]],
    "bad_words_list": [[5, 6], [1, 2]],
    "tier": [b"small"],
    "min_tier": [b"medium"],
    "max_tier": [b"medium"],
    "deadline_ms": [60_000],
    "draft_tier": [b"small"],
    "reuse_prefix": [False],
    "tier_policy": [b"cascade"],
    "cascade_threshold": [-2.0],
}
_TOKENS = ("input_ids", "input_lengths", "stop_words_list", "bad_words_list")
# `stop` and `switch_tier` start nothing, and a ticket is the server's own (`tickets`).
SETTABLE = [spec for spec in INPUTS if spec.name not in ("stop", "switch_tier", TICKET)]


def value_of(spec) -> np.ndarray:
    """A value [1, *dims] that asks for something."""
    if spec.name in _VALUES:
        return np.array([_VALUES[spec.name]], _NUMPY[spec.dtype])
    shape = [1, *(2 if d == -1 else d for d in spec.dims)]
    return np.full(shape, _BY_DTYPE.get(spec.dtype, 3)).astype(_NUMPY[spec.dtype])


def plain_arrays(spec) -> dict[str, np.ndarray]:
    """The least request that `spec` can be added to, by the worker's names."""
    if spec.name == "messages":
        return {"max_tokens": np.array([[2]], np.int32)}
    if spec.name in _TOKENS or spec.ensemble is None and spec.bls is None:
        lists = {"input_ids": [5, 6], "input_lengths": [2], "max_tokens": [2]}
        return {name: np.array([values], np.int32) for name, values in lists.items()}
    text = np.array([[b"hi"]], np.object_)
    return {"text_input": text, "max_tokens": np.array([[2]], np.int32), **_needed(spec)}


def _needed(spec) -> dict[str, np.ndarray]:
    """What `spec` has a meaning beside."""
    is_threshold = spec.name == "cascade_threshold"
    return {"tier_policy": np.array([[b"cascade"]], np.object_)} if is_threshold else {}


@pytest.mark.parametrize("spec", SETTABLE, ids=lambda spec: spec.name)
def test_row_6_every_input_changes_the_request_or_is_refused_or_says_why_it_cannot(spec):
    """Row 6: a field has no effect."""
    plain = plain_arrays(spec)
    arrays = {**plain, spec.name: value_of(spec)}

    def parse(given):
        return parse_request(given, lambda: "r")[0]

    if spec.use is Use.REFUSED:
        with pytest.raises(UnsupportedFieldError, match=f"^{spec.name}: .*{spec.reason[:20]}"):
            parse(arrays)
    elif spec.use is Use.NO_EFFECT:
        assert spec.reason
        assert parse(arrays) == parse(plain)
    elif spec.name == "messages":
        assert parse(arrays).prompt.messages == [{"role": "user", "content": "x"}]
    else:
        assert parse(arrays) != parse(plain)


@pytest.mark.parametrize(
    ("model", "spec"),
    [(m, s) for m in (ENSEMBLE, BLS, TENSORRT_LLM) for s in SETTABLE if s.name_in(m)],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_row_6_every_input_reaches_the_worker_through_every_drop_in_model(slow_server, model, spec):
    """Row 6: a field is dropped by a pipeline step."""
    if model == TENSORRT_LLM:
        lists = {"input_ids": [5, 6], "input_lengths": [2], "max_tokens": [2]}
        plain = {name: np.array([values], np.int32) for name, values in lists.items()}
        plain |= _needed(spec)
    else:
        plain = plain_arrays(spec)
    names = {s.name: s.name_in(model) for s in INPUTS}
    arrays = {**plain, spec.name: value_of(spec)}
    done = Stream(
        slow_server.grpc_port,
        {names[name]: array for name, array in arrays.items()},
        model=model,
        outputs=("output_ids" if model == TENSORRT_LLM else "text_output",),
    ).finish()
    try:
        parsed = parse_request(arrays, lambda: "")[0]
    except MfsError as error:
        assert type(error).__name__ in done.error and str(error) in done.error
    else:
        assert done.error is None and done.results
        assert slow_server.seen() == [repr((parsed.prompt, parsed.options))]


# -- HTTP ----------------------------------------------------------------------------------------


def test_generate_answers_with_one_json_document(server, offline_text):
    status, text = post(server, "ensemble/generate", {"text_input": PROMPT, "max_tokens": 9})
    assert status == 200
    assert json.loads(text)["text_output"] == PROMPT + offline_text(PROMPT, "large", 9)


def test_generate_stream_answers_with_server_sent_events(server, offline_text):
    events = generate_stream(server, text_input=PROMPT, max_tokens=9, stream=True)
    assert len(events) > 1
    assert "".join(e["text_output"] for e in events) == offline_text(PROMPT, "large", 9)
    assert [e["finish_reason"] for e in events] == [""] * (len(events) - 1) + ["length"]


@pytest.mark.parametrize("call", ("generate", "generate_stream"))
@pytest.mark.parametrize(
    ("body", "status", "named"),
    [
        ({"text_input": PROMPT, "tier": "huge"}, 400, "tier: expected one of small, medium, large"),
        ({"text_input": PROMPT, "max_tokens": 0}, 400, "max_tokens: expected at least 1, got 0"),
        ({"text_input": PROMPT, "temprature": 1}, 400, "temprature"),
        ({"text_input": PROMPT, "beam_width": 4}, 400, "beam_width"),
        ({"max_tokens": 4}, 400, "text_input"),
        ({"text_input": PROMPT, "max_tokens": "x"}, 500, "signed-integer"),  # Triton's own words
        (b'{"text_input": ', 500, "failed to parse the request JSON"),
    ],
    ids=str,
)  # fmt: skip
def test_http_errors_have_a_status_and_name_the_field(server, call, body, status, named):
    got, text = post(server, f"ensemble/{call}", body)
    assert got == status, text
    assert named in text


def test_an_unknown_model_is_named(server):
    status, text = post(server, "nobody/generate", {"text_input": PROMPT})
    assert status in (400, 404)
    assert "nobody" in text
