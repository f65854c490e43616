"""An exported tier is an ordinary model: the same bits read back, the same tokens elsewhere."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from exported import FAMILIES, engine_greedy, write_export_family
from mfs_trt.checkpoint import open_checkpoint
from mfs_trt.checkpoint.gguf_writer import write_gguf_checkpoint
from mfs_trt.checkpoint.hf_writer import write_hf_checkpoint
from mfs_trt.checkpoint.trtllm import write_trtllm_checkpoint
from mfs_trt.model.rope import inverse_frequencies
from mfs_trt.tensor_names import tensor_shapes
from mfs_trt.weights.tier import TierCheckpoint

TIERS = ("t0", "t1", "t2")
PROMPTS = [np.random.default_rng(n).integers(0, 61, n).tolist() for n in (1, 2, 9, 17)]
GGUF_FAMILIES = [name for name in FAMILIES if not name.endswith("2-window")]


def assert_same_bits(exported: TierCheckpoint, found) -> None:
    for name in tensor_shapes(exported.config):
        assert torch.equal(found.load(name).to(exported.load(name).dtype), exported.load(name)), (
            name
        )


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("name", FAMILIES)
def test_hf_export_read_back_is_the_tier_bit_for_bit(tmp_path, name, tier):
    reader = TierCheckpoint(write_export_family(tmp_path / "family", name), tier)
    write_hf_checkpoint(reader, tmp_path / "out")
    found = open_checkpoint(tmp_path / "out")
    assert found.config == reader.config
    assert found.config.num_layers == {"t0": 1, "t1": 3, "t2": 4}[tier]
    assert_same_bits(reader, found)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("tier", TIERS)
def test_trtllm_export_read_back_is_the_tier_bit_for_bit(tmp_path, tier, tp):
    reader = TierCheckpoint(write_export_family(tmp_path / "family", "llama-tied"), tier)
    write_trtllm_checkpoint(reader, tmp_path / "out", tp)
    found = open_checkpoint(tmp_path / "out")
    assert found.config == reader.config
    assert_same_bits(reader, found)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("name", [n for n in GGUF_FAMILIES if not n.startswith("qwen")])
def test_gguf_export_read_back_is_the_tier_bit_for_bit(tmp_path, name, tier):
    reader = TierCheckpoint(write_export_family(tmp_path / "family", name), tier)
    write_gguf_checkpoint(reader, tmp_path / "out.gguf")
    found = open_checkpoint(tmp_path / "out.gguf")
    frequencies = [inverse_frequencies(config) for config in (found.config, reader.config)]
    np.testing.assert_allclose(frequencies[0][0], frequencies[1][0], rtol=1e-6)
    assert frequencies[0][1] == frequencies[1][1]
    alike = replace(found.config, architecture=reader.config.architecture, rope=reader.config.rope)
    assert alike == reader.config
    assert_same_bits(reader, found)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gguf_export_in_two_bytes_holds_the_rounded_weights(tmp_path, dtype):
    reader = TierCheckpoint(write_export_family(tmp_path / "family", "llama"), "t1", dtype)
    write_gguf_checkpoint(reader, tmp_path / "out.gguf")
    found = open_checkpoint(tmp_path / "out.gguf")
    assert found.dtype == dtype
    assert_same_bits(reader, found)


@pytest.mark.parametrize("name", FAMILIES)
def test_transformers_generates_from_the_export_what_the_engine_does_at_the_tier(tmp_path, name):
    store = write_export_family(tmp_path / "family", name)
    for tier in TIERS:
        write_hf_checkpoint(TierCheckpoint(store, tier), tmp_path / tier)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / tier, dtype=torch.float32)
        expected = engine_greedy(tmp_path / "family", tier, PROMPTS, 16)
        assert len({tuple(tokens) for tokens in expected}) > 1
        for prompt, tokens in zip(PROMPTS, expected, strict=True):
            out = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt)),
                max_new_tokens=16,
                do_sample=False,
                pad_token_id=0,
            )
            assert out[0, len(prompt) :].tolist() == tokens


# transformers takes the head size of a Qwen GGUF for granted: that of its own defaults.
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("llama", {}),
        ("llama-tied", {}),
        ("mistral", {}),
        ("qwen2", {"head_dim": 10}),
        ("qwen3", {"head_dim": 128}),
    ],
)
def test_gguf_export_read_by_transformers_holds_the_same_weights(tmp_path, name, sizes):
    pytest.importorskip("accelerate", reason="transformers reads GGUF files with it only")
    store = write_export_family(tmp_path / "family", name, **sizes)
    for tier in TIERS:
        reader = TierCheckpoint(store, tier)
        write_gguf_checkpoint(reader, tmp_path / "out.gguf", force=True)
        write_hf_checkpoint(reader, tmp_path / "hf", force=True)
        read = AutoModelForCausalLM.from_pretrained(
            tmp_path, gguf_file="out.gguf", dtype=torch.float32
        ).state_dict()
        expected = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").state_dict()
        assert read.keys() == expected.keys()
        assert [key for key in read if not torch.equal(read[key], expected[key])] == []
