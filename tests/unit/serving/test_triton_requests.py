"""Triton tensors → requests."""

import numpy as np
import pytest
from tritonclient.utils import triton_to_np_dtype

from mfs_trt.errors import InvalidRequestError, UnsupportedFieldError
from mfs_trt.request import PromptRequest
from mfs_trt.sampling_params import SamplingParams
from mfs_trt.serving.triton_requests import (
    ParsedRow,
    ResponseOptions,
    check_parameters,
    parse_request,
    read_word_list,
)
from mfs_trt.serving.triton_spec import INPUTS, TICKET, Use

# A value of each input that asks for something, and what the request then says.
SET_VALUES = {
    "max_tokens": (7, ("params", "max_tokens", 7)),
    "num_return_sequences": (3, ("params", "n", 3)),
    "top_k": (5, ("params", "top_k", 5)),
    "top_p": (0.7, ("params", "top_p", 0.7)),
    "min_p": (0.1, ("params", "min_p", 0.1)),
    "temperature": (0.7, ("params", "temperature", 0.7)),
    "repetition_penalty": (1.3, ("params", "repetition_penalty", 1.3)),
    "presence_penalty": (0.4, ("params", "presence_penalty", 0.4)),
    "frequency_penalty": (0.6, ("params", "frequency_penalty", 0.6)),
    "min_tokens": (4, ("params", "min_tokens", 4)),
    "min_length": (4, ("params", "min_tokens", 4)),
    "seed": (2**64 - 1, ("params", "seed", 2**64 - 1)),
    "random_seed": (9, ("params", "seed", 9)),
    "end_id": (-1, ("params", "end_id", -1)),
    "ignore_eos": (True, ("params", "ignore_eos", True)),
    "stop_words": (["a", "bc"], ("params", "stop", ("a", "bc"))),
    "bad_words": (["x"], ("params", "bad_words", ("x",))),
    "stop_words_list": ([[5, 6, 7], [2, 3, -1]], ("prompt", "stop_token_ids", ((5, 6), (7,)))),
    "bad_words_list": ([[5, 0], [1, -1]], ("prompt", "bad_token_ids", ((5,),))),
    "return_log_probs": (True, ("params", "return_log_probs", True)),
    "return_generation_logits": (True, ("params", "return_generation_logits", True)),
    "tier": ("small", ("prompt", "tier", "small")),
    "min_tier": ("small", ("prompt", "min_tier", "small")),
    "max_tier": ("large", ("prompt", "max_tier", "large")),
    "tier_policy": ("load", ("prompt", "tier_policy", "load")),
    "cascade_threshold": (-0.7, ("prompt", "cascade_threshold", -0.7)),
    "draft_tier": (["small", "medium"], ("prompt", "draft_tiers", ("small", "medium"))),
    "num_speculative_tokens": (3, ("prompt", "num_speculative_tokens", 3)),
    "reuse_prefix": (False, ("prompt", "reuse_prefix", False)),
    "cache_salt": ("pepper", ("prompt", "cache_salt", "pepper")),
    "priority": (-2, ("prompt", "priority", -2)),
    "deadline_ms": (250, ("prompt", "deadline_s", 0.25)),
    "stream": (True, ("options", "is_streaming", True)),
    "exclude_input_in_output": (True, ("options", "excludes_input", True)),
    "return_perf_metrics": (True, ("options", "wants_perf_metrics", True)),
    "return_num_input_tokens": (True, ("options", "wants_num_input_tokens", True)),
    "return_num_output_tokens": (True, ("options", "wants_num_output_tokens", True)),
}
PROMPTS = ("text_input", "messages", "input_ids", "input_lengths", TICKET, "stop", "switch_tier")


def numpy_type(spec):
    return triton_to_np_dtype({"STRING": "BYTES"}.get(spec.dtype, spec.dtype))


def tensor(name, value):
    """One row as Triton server hands it over: [1, *dims]."""
    spec = next(spec for spec in INPUTS if spec.name == name)
    values = value if isinstance(value, list) else [value]
    if spec.dtype == "STRING":
        return np.array([[v.encode() for v in values]], dtype=np.object_)
    return np.array([values], dtype=numpy_type(spec))


def tensors(**values):
    return {name: tensor(name, value) for name, value in values.items()}


def parse(arrays, **more):
    numbers = iter(range(100))
    return parse_request(arrays, lambda: f"r{next(numbers)}", **more)


def parse_one(**values) -> ParsedRow:
    return parse(tensors(**{"text_input": "hi", **values}))[0]


@pytest.mark.parametrize("name", SET_VALUES)
def test_every_input_set_alone_changes_the_engine_request(name):
    value, (where, field, expected) = SET_VALUES[name]
    row = parse_one(**{name: value})
    plain = parse_one()
    holder = {"params": row.prompt.params, "prompt": row.prompt, "options": row.options}[where]
    before = {"params": plain.prompt.params, "prompt": plain.prompt, "options": plain.options}
    assert getattr(holder, field) == expected
    assert getattr(before[where], field) != expected


def test_no_input_of_the_specification_is_left_without_a_meaning():
    served = {s.name for s in INPUTS if s.use in (Use.SAMPLING, Use.REQUEST, Use.OPTION)}
    assert served == {*SET_VALUES, *PROMPTS}
    assert all(spec.reason for spec in INPUTS if spec.name not in served)


REFUSED = [spec for spec in INPUTS if spec.use is Use.REFUSED]


@pytest.mark.parametrize("spec", REFUSED, ids=lambda spec: spec.name)
def test_a_field_that_is_not_served_is_refused_by_name(spec):
    shape = [1, *(2 if d == -1 else d for d in spec.dims)]
    array = np.full(shape, True if spec.dtype == "BOOL" else b"x" if spec.dtype == "STRING" else 3)
    array = array.astype(numpy_type(spec))
    with pytest.raises(UnsupportedFieldError, match=f"^{spec.name}: "):
        parse({**tensors(text_input="hi"), spec.name: array})


@pytest.mark.parametrize("spec", REFUSED, ids=lambda spec: spec.name)
def test_a_field_that_is_not_served_passes_with_a_value_that_asks_for_nothing(spec):
    arrays = tensors(text_input="hi")
    for value in spec.neutral:
        assert parse({**arrays, spec.name: tensor(spec.name, value)})[0] == parse(arrays)[0]
    if -1 in spec.dims:
        empty = np.zeros([1, *(0 if d == -1 else d for d in spec.dims)], numpy_type(spec))
        assert parse({**arrays, spec.name: empty})[0] == parse(arrays)[0]


def test_the_usual_request_of_tensorrt_llm_clients_is_served():
    row = parse_one(
        max_tokens=20, bad_words="", stop_words="", end_id=2, pad_id=2, top_k=1, top_p=0.0,
        temperature=1.0, length_penalty=1.0, repetition_penalty=1.0, beam_width=1, random_seed=0,
        stream=False,
    )  # fmt: skip
    assert row.prompt.params == SamplingParams(
        max_tokens=20, end_id=2, top_k=1, top_p=0.0, temperature=1.0, seed=0
    )
    assert row.prompt.params.is_greedy


def test_a_request_without_parameters_has_the_documented_defaults():
    row = parse_one()
    assert row.prompt == PromptRequest("r0", prompt="hi")
    assert row.options == ResponseOptions()


def test_an_alias_may_repeat_but_not_contradict():
    assert parse_one(min_tokens=3, min_length=3).prompt.params.min_tokens == 3
    with pytest.raises(
        InvalidRequestError, match="min_length: expected the value of min_tokens, 3"
    ):
        parse_one(min_tokens=3, min_length=4)


def test_rows_of_a_batch_are_separate_requests_with_lists_padded_by_empty_words():
    rows = parse(
        {
            "text_input": np.array([[b"a"], [b"b"]], dtype=np.object_),
            "max_tokens": np.array([[3], [4]], np.int32),
            "stop_words": np.array([[b"x", b"y"], [b"z", b""]], dtype=np.object_),
        }
    )
    assert [(r.prompt.request_id, r.prompt.prompt) for r in rows] == [("r0", "a"), ("r1", "b")]
    assert [r.prompt.params.max_tokens for r in rows] == [3, 4]
    assert [r.prompt.params.stop for r in rows] == [("x", "y"), ("z",)]


def test_token_ids_are_cut_to_their_length():
    arrays = tensors(input_ids=[5, 6, 0, 0], input_lengths=2)
    assert parse(arrays)[0].prompt.token_ids == [5, 6]
    with pytest.raises(InvalidRequestError, match="input_lengths: expected between 1 and 4"):
        parse(tensors(input_ids=[5, 6, 0, 0], input_lengths=5))


@pytest.mark.parametrize(
    "given", [{}, {"max_tokens": 3}, {"text_input": "a", "input_ids": [1]}], ids=str
)
def test_anything_but_one_prompt_is_refused(given):
    with pytest.raises(InvalidRequestError, match="text_input"):
        parse(tensors(**given))


def test_chat_messages_come_as_json():
    text = '[{"role": "user", "content": "é"}]'
    row = parse(tensors(messages=text))[0]
    assert row.prompt.messages == [{"role": "user", "content": "é"}]
    for wrong in ("{", "[]", '["hi"]', '[{"role": "user"}]', '{"role": "user", "content": "x"}'):
        with pytest.raises(InvalidRequestError, match="messages: expected a JSON list"):
            parse(tensors(messages=wrong))


def test_the_earlier_of_deadline_and_timeout_counts():
    arrays = tensors(text_input="hi", deadline_ms=250)
    assert parse(arrays, timeout_s=0.1)[0].prompt.deadline_s == 0.1
    assert parse(arrays, timeout_s=9.0)[0].prompt.deadline_s == 0.25
    assert parse(tensors(text_input="hi"), timeout_s=0.0)[0].prompt.deadline_s is None
    with pytest.raises(InvalidRequestError, match="deadline_ms: expected at least 0"):
        parse_one(deadline_ms=-1)


def test_text_that_is_not_utf8_is_refused_by_name():
    with pytest.raises(InvalidRequestError, match="text_input: expected UTF-8"):
        parse({"text_input": np.array([[b"\xff"]], dtype=np.object_)})


def test_offsets_of_a_word_list_must_ascend():
    with pytest.raises(InvalidRequestError, match="stop_words_list: expected ascending"):
        read_word_list("stop_words_list", np.array([[1, 2], [2, 1]], np.int32))
    assert read_word_list("stop_words_list", np.zeros((2, 0), np.int32)) == ()


def test_a_request_parameter_that_nobody_reads_is_refused_by_name():
    check_parameters(
        {"id": "7", "triton_enable_empty_final_response": True, "x-trace": "1"}, ["x-*"]
    )
    with pytest.raises(UnsupportedFieldError, match="temprature"):
        check_parameters({"temprature": 0.5})
    with pytest.raises(UnsupportedFieldError, match="temperature: expected an input tensor"):
        check_parameters({"temperature": 0.5})
