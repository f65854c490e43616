"""What people complained of in log-probabilities and logits, on the real server."""

import numpy as np
import pytest
import torch

from mfs_trt.sampling_params import SamplingParams
from streams import Stream

pytestmark = pytest.mark.triton

PROMPT = "the river moves"
OUTPUTS = (
    "text_output", "output_ids", "output_log_probs", "cum_log_probs", "generation_logits",
    "num_output_tokens", "finish_reason",
)  # fmt: skip
REFERENCE_TOLERANCE = 2e-4  # fp32 against Hugging Face's fp32, log-probabilities


def ask(server, **fields) -> Stream:
    """All outputs of the worker model, which has text and token ids at once."""
    asked = {
        "text_input": PROMPT, "stream": True, "return_log_probs": True,
        "return_generation_logits": True, "return_num_output_tokens": True,
        "exclude_input_in_output": True, **fields,
    }  # fmt: skip
    return Stream(server.grpc_port, asked, model="family", outputs=OUTPUTS).finish()


def generation_logits(done: Stream) -> np.ndarray:
    """[num_tokens, vocab_size] over all responses."""
    arrays = [r.as_numpy("generation_logits") for r in done.results]
    assert all(a.ndim == 4 and a.shape[:2] == (1, 1) for a in arrays), [a.shape for a in arrays]
    return np.concatenate([a[0, 0] for a in arrays])


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def assert_aligned(done: Stream) -> None:
    """Every response has as many logits and log-probabilities as tokens, of the same tokens."""
    for result in done.results:
        count = result.as_numpy("num_output_tokens").item()
        assert result.as_numpy("output_ids").shape == (1, 1, count)
        assert result.as_numpy("output_log_probs").shape == (1, 1, count)
        assert result.as_numpy("generation_logits").shape[2] == count
    token_ids, log_probs = done.values("output_ids"), done.values("output_log_probs")
    expected = log_softmax(generation_logits(done))[np.arange(len(token_ids)), token_ids]
    np.testing.assert_allclose(log_probs, expected, atol=1e-4)
    np.testing.assert_allclose(done.values("cum_log_probs")[-1], sum(log_probs), atol=1e-3)


@pytest.fixture(scope="module")
def hugging_face(family_dir):
    """The model that the family was made of, in transformers."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(family_dir.parent / "hf").eval()


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"top_k": 1},
        {"temperature": 0.0},
        {"top_k": 3, "temperature": 0.3, "seed": 1},
        {"top_p": 0.2, "temperature": 2.0, "seed": 2},
        {"repetition_penalty": 1.5, "frequency_penalty": 1.0},
    ],
    ids=str,
)
def test_row_15_log_probs_are_those_of_the_unfiltered_distribution(
    server, llm, hugging_face, params
):
    """Row 15: output_log_probs are all zero under greedy sampling."""
    done = ask(server, max_tokens=12, tier="large", ignore_eos=True, **params)
    token_ids, log_probs = done.values("output_ids"), done.values("output_log_probs")
    prompt_ids = llm.tokenizer.encode(PROMPT)
    with torch.no_grad():
        logits = hugging_face(torch.tensor([prompt_ids + token_ids])).logits[0].numpy()
    reference = log_softmax(logits[len(prompt_ids) - 1 : -1])
    expected = reference[np.arange(len(token_ids)), token_ids]
    np.testing.assert_allclose(log_probs, expected, atol=REFERENCE_TOLERANCE)
    assert max(log_probs) < -0.01
    assert len(set(log_probs)) == len(log_probs) == 12


def ended_by(reason: str, llm) -> dict:
    """Fields of a request that ends in this way, before its 20th token."""
    free = llm.generate(PROMPT, SamplingParams(max_tokens=20))[0].outputs[0]
    return {
        "length": {"max_tokens": 7},
        "first token": {"max_tokens": 1},
        "end token": {"max_tokens": 20, "end_id": free.token_ids[5]},
        "end token at once": {"max_tokens": 20, "end_id": free.token_ids[0]},
        "stop word": {"max_tokens": 20, "stop_words": [free.text[4:6]]},
    }[reason]


@pytest.mark.parametrize("is_streaming", (True, False))
@pytest.mark.parametrize(
    "reason", ("length", "first token", "end token", "end token at once", "stop word")
)
def test_row_16_there_are_logits_for_every_token_whatever_ends_it(
    server, llm, reason, is_streaming
):
    """Row 16: generation logits miss a step when EOS ends it."""
    fields = ended_by(reason, llm)
    done = ask(server, stream=is_streaming, **fields)
    assert_aligned(done)
    is_stop = "end" in reason or "stop" in reason
    assert done.values("finish_reason")[-1] == (b"stop" if is_stop else b"length")
    if is_stop:
        assert len(done.values("output_ids")) < fields["max_tokens"]
    if "end_id" in fields:
        assert done.values("output_ids")[-1] == fields["end_id"]


@pytest.mark.parametrize("is_streaming", (True, False))
def test_row_17_log_probs_fit_the_tokens_when_a_stop_word_of_three_tokens_is_cut_off(
    slow_server, is_streaming
):
    """Row 17: log-probs are longer than the tokens after a stop word was cut off."""
    tokenizer = slow_server.offline.tokenizer
    text = "One two three four five six."
    token_ids = tokenizer.encode(text)
    slow_server.set("script", token_ids)
    start = next(
        i for i in range(3, len(token_ids) - 3) if tokenizer.decode(token_ids[i : i + 3]).strip()
    )
    word = tokenizer.decode(token_ids[start : start + 3])
    assert tokenizer.decode(token_ids[:start]) + word in text
    done = ask(slow_server, max_tokens=len(token_ids), stop_words=[word], stream=is_streaming)
    assert done.text == text[: text.index(word)]
    assert done.values("output_ids") == token_ids[: start + 3]
    assert_aligned(done)


@pytest.mark.parametrize("model", ("ensemble", "tensorrt_llm_bls", "family"))
def test_row_18_logits_and_log_probs_are_streamed_with_their_tokens(server, llm, model):
    """Row 18: streaming is refused with logits."""
    outputs = ("text_output", "generation_logits", "output_log_probs", "num_output_tokens")
    asked = {
        "text_input": PROMPT, "stream": True, "max_tokens": 9, "return_log_probs": True,
        "return_generation_logits": True, "return_num_output_tokens": True,
    }  # fmt: skip
    done = Stream(server.grpc_port, asked, model=model, outputs=outputs).finish()
    expected = llm.generate(PROMPT, SamplingParams(max_tokens=9, return_log_probs=True))[0]
    output = expected.outputs[0]
    assert len(done.results) > 1
    assert done.text == output.text
    logits = generation_logits(done)
    assert logits.shape == (len(output.token_ids), llm.family.model.vocab_size)
    assert logits.argmax(-1).tolist() == output.token_ids
    np.testing.assert_allclose(done.values("output_log_probs"), output.log_probs, atol=1e-5)
    counts = done.values("num_output_tokens")
    assert [r.as_numpy("generation_logits").shape[2] for r in done.results] == counts


def test_row_18_logits_not_asked_for_are_not_sent(server):
    """Row 18: streaming is refused with logits."""
    outputs = ("text_output", "generation_logits", "output_log_probs")
    done = Stream(
        server.grpc_port, {"text_input": PROMPT, "stream": True, "max_tokens": 3}, outputs=outputs
    ).finish()
    assert done.text
    assert all(r.as_numpy(name) is None for r in done.results for name in outputs[1:])
