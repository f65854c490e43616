"""Chunks → Triton tensors."""

import numpy as np
from tritonclient.utils import triton_to_np_dtype

from mfs_trt.request import FinishReason, PromptRequest
from mfs_trt.serving.triton_requests import ParsedRow, ResponseOptions
from mfs_trt.serving.triton_responses import OutputChunk, build_outputs, echo_prompt
from mfs_trt.serving.triton_spec import OUTPUTS, TICKET

ALL_OUTPUTS = frozenset(spec.name for spec in OUTPUTS)
CHUNK = OutputChunk(
    text="ab",
    token_ids=(1, 2),
    log_probs=(-0.5, -1.0),
    logits=np.ones((2, 4), np.float32),
    num_new_tokens=2,
    cumulative_log_prob=-1.5,
    num_prompt_tokens=3,
    tier="small",
    finish_reason=FinishReason.LENGTH,
)


def test_outputs_have_the_declared_types_and_ranks():
    everything = ResponseOptions(False, False, True, True, True, True, True)
    arrays = build_outputs(CHUNK, everything, 0, 0, ALL_OUTPUTS)
    specs = {spec.name: spec for spec in OUTPUTS}
    assert set(arrays) == ALL_OUTPUTS - {"context_logits", TICKET}
    for name, array in arrays.items():
        dtype = specs[name].dtype
        assert array.dtype == triton_to_np_dtype({"STRING": "BYTES"}.get(dtype, dtype)), name
        assert array.ndim == 1 + len(specs[name].dims), name
        assert all(d in (-1, n) for d, n in zip(specs[name].dims, array.shape[1:], strict=True))
    assert arrays["output_ids"].tolist() == [[[1, 2]]]
    assert arrays["sequence_length"].tolist() == [[2]]
    assert arrays["num_output_tokens"].tolist() == [[2]]
    assert arrays["finish_reason"].tolist() == [[b"length"]]


def test_outputs_come_only_when_requested_and_asked_for():
    plain = build_outputs(CHUNK, ResponseOptions(), 0, 0, ALL_OUTPUTS)
    assert set(plain) == {
        "text_output", "output_ids", "sequence_length", "batch_index", "sequence_index",
        "tier_used", "finish_reason",
    }  # fmt: skip
    asked = ResponseOptions(return_log_probs=True)
    assert set(build_outputs(CHUNK, asked, 0, 0, frozenset({"cum_log_probs"}))) == {"cum_log_probs"}


def test_an_unstreamed_answer_starts_with_the_prompt_unless_excluded():
    class Tokenizer:
        def encode(self, text):
            return [ord(c) for c in text]

        def decode(self, ids):
            return "".join(chr(i) for i in ids)

    chunk = OutputChunk(text="xy", token_ids=(120, 121))

    def echo(prompt: PromptRequest, **options) -> tuple:
        parsed = ParsedRow(prompt, ResponseOptions(**options))
        result = echo_prompt(chunk, parsed, ALL_OUTPUTS, Tokenizer())
        return result.text, result.token_ids

    text, ids = PromptRequest("r", prompt="hi"), PromptRequest("r", token_ids=[104, 105])
    assert echo(text) == echo(ids) == ("hixy", (104, 105, 120, 121))
    assert echo(text, excludes_input=True) == ("xy", (120, 121))
    assert echo(text, is_streaming=True) == ("xy", (120, 121))
    assert echo(PromptRequest("r", messages=[{"role": "user", "content": "q"}]))[0] == "xy"
