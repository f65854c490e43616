"""The real SmolLM2-135M: its top tier gives what Hugging Face gives with the same weights."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from mfs_trt.builder.build import build_engine
from mfs_trt.builder.config import BuildConfig
from mfs_trt.engine.interface import EngineLimits
from mfs_trt.request import PromptRequest
from mfs_trt.sampling_params import SamplingParams
from mfs_trt.serving.core import load_core
from smollm2 import MAX_TOKENS, PROMPTS, generate_greedily
from tiny import drain, submit

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def core(smollm2_family, tmp_path_factory):
    limits = EngineLimits(max_num_seqs=16, max_num_batched_tokens=64, max_model_len=512)
    config = BuildConfig(target="reference", memory_nbytes=256 << 20, limits=limits)
    return load_core(build_engine(smollm2_family, tmp_path_factory.mktemp("engine") / "e", config))


@pytest.fixture(scope="module")
def completions(core):
    """Each prompt's events at the top tier, all of them in one batch."""
    params = SamplingParams(max_tokens=MAX_TOKENS, return_generation_logits=True)
    for i, text in enumerate(PROMPTS):
        submit(core, PromptRequest(str(i), params, prompt=text))
    events = drain(core)
    return [[e for e in events if e.request_id == str(i)] for i in range(len(PROMPTS))]


def test_weights_equal_those_that_transformers_reads_from_the_file(smollm2_gguf, smollm2_hf):
    pytest.importorskip("accelerate", reason="transformers reads GGUF files with it only")
    read = AutoModelForCausalLM.from_pretrained(
        smollm2_gguf.parent, gguf_file=smollm2_gguf.name, dtype=torch.float32
    )
    theirs, ours = read.state_dict(), smollm2_hf.state_dict()
    assert theirs.keys() == ours.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    assert (
        read.config.rope_parameters["rope_theta"] == smollm2_hf.config.rope_parameters["rope_theta"]
    )


def test_logits_of_every_generated_token_are_within_a_ten_thousandth(core, smollm2_hf, completions):
    assert len({len(core.tokenizer.encode(text)) for text in PROMPTS}) == len(PROMPTS)
    for text, events in zip(PROMPTS, completions, strict=True):
        ids = core.tokenizer.encode(text)
        tokens = [t for e in events for t in e.token_ids]
        with torch.inference_mode():
            logits = smollm2_hf(torch.tensor([[*ids, *tokens[:-1]]])).logits
        expected = logits[0, len(ids) - 1 :].numpy()
        actual = np.concatenate([e.logits for e in events])
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-4)


def test_greedy_text_equals_generate(core, smollm2_hf, completions):
    for text, events in zip(PROMPTS, completions, strict=True):
        ids = core.tokenizer.encode(text)
        expected = generate_greedily(smollm2_hf, ids, core.family.end_token_ids)
        assert [t for e in events for t in e.token_ids] == expected
        assert "".join(e.text for e in events) == core.tokenizer.decode(expected)
