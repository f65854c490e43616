import numpy as np
import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from mfs_trt.checkpoint.hf_config import config_from_hf
from mfs_trt.errors import ConfigError
from mfs_trt.model.rope import max_exact_positions, rope_tables

MAX_POSITIONS = 4096
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
SCALINGS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": YARN,
    "yarn with mscale": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.8},
    "yarn with betas": {**YARN, "beta_fast": 16, "beta_slow": 2, "truncate": False},
    "yarn with factor": {**YARN, "attention_factor": 1.3},
    "llama3": LLAMA3,
}


def make(head_dim, theta, scaling):
    theirs = transformers.LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        head_dim=head_dim,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_theta": theta, **scaling},
    )
    return theirs, config_from_hf({**theirs.to_dict(), "model_type": "llama"})


def longrope(head_dim, original=MAX_POSITIONS):
    factors = np.random.default_rng(0).uniform(1, 8, (2, head_dim // 2)).tolist()
    return {
        "rope_type": "longrope",
        "short_factor": factors[0],
        "long_factor": factors[1],
        "original_max_position_embeddings": original,
        "factor": 4.0,
    }


def assert_equals_transformers(head_dim, theta, scaling):
    theirs, ours = make(head_dim, theta, scaling)
    cos, sin = rope_tables(ours, MAX_POSITIONS)
    positions = torch.arange(MAX_POSITIONS)[None]
    their_cos, their_sin = LlamaRotaryEmbedding(theirs)(torch.zeros(1), positions)
    assert cos.shape == sin.shape == (MAX_POSITIONS, head_dim // 2)
    assert cos.dtype == sin.dtype == np.float32
    assert np.abs(cos - their_cos[0, :, : head_dim // 2].numpy()).max() <= 1e-6
    assert np.abs(sin - their_sin[0, :, : head_dim // 2].numpy()).max() <= 1e-6


@pytest.mark.parametrize("head_dim", [8, 64, 80, 96, 128])
@pytest.mark.parametrize("theta", [10000.0, 130000.0, 5e6])
@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_tables_equal_those_of_transformers(head_dim, theta, scaling):
    assert_equals_transformers(head_dim, theta, scaling)


@pytest.mark.parametrize("head_dim", [8, 96])
def test_longrope_within_its_original_context_uses_the_short_factors(head_dim):
    assert_equals_transformers(head_dim, 10000.0, longrope(head_dim))


def test_longrope_attention_factor_follows_from_the_contexts():
    scaling = longrope(8, original=MAX_POSITIONS)
    del scaling["factor"]
    assert_equals_transformers(8, 10000.0, scaling)


def test_dynamic_scaling_is_exact_up_to_the_original_context_only():
    _, config = make(8, 10000.0, SCALINGS["dynamic"])
    assert max_exact_positions(config) == MAX_POSITIONS
    with pytest.raises(ConfigError, match=r"dynamic.*4096.*4097"):
        rope_tables(config, MAX_POSITIONS + 1)


def test_longrope_is_exact_up_to_the_original_context_only():
    _, config = make(8, 10000.0, longrope(8, original=1024))
    assert max_exact_positions(config) == 1024
    with pytest.raises(ConfigError, match=r"longrope.*1024.*1025"):
        rope_tables(config, 1025)


@pytest.mark.parametrize("name", ["default", "linear", "yarn", "llama3"])
def test_other_types_serve_any_length(name):
    _, config = make(8, 10000.0, SCALINGS[name])
    assert max_exact_positions(config) is None
    assert len(rope_tables(config, 2 * MAX_POSITIONS + 1)[0]) == 2 * MAX_POSITIONS + 1


def test_longer_table_starts_with_the_shorter_one():
    _, config = make(64, 10000.0, LLAMA3)
    short, long = rope_tables(config, 100)[0], rope_tables(config, 9000)[0]
    assert np.array_equal(long[:100], short)


def test_factors_of_another_length_are_refused():
    _, config = make(8, 10000.0, longrope(8))
    config.rope.scaling["short_factor"] = [1.0]
    with pytest.raises(ConfigError, match="expected 4 numbers, got 1"):
        rope_tables(config, 10)
