import numpy as np
import pytest

from mfs_trt.checkpoint.gguf_config import config_from_gguf
from mfs_trt.errors import CheckpointError

FIELDS = {
    "general.architecture": "llama",
    "llama.block_count": 4,
    "llama.context_length": 1024,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": float(np.float32(1e-5)),
    "llama.rope.freq_base": 500000.0,
}
SHAPES = {"token_embd.weight": (100, 64), "output.weight": (100, 64)}


def make(shapes=SHAPES, factors=None, **fields):
    named = {key.replace("__", "."): value for key, value in fields.items()}
    return config_from_gguf({**FIELDS, **named}, shapes, factors or {})


def test_sizes_are_read():
    config = make()
    assert (config.num_layers, config.hidden_size, config.head_dim) == (4, 64, 16)
    assert (config.vocab_size, config.rope.theta) == (100, 500000.0)


def test_epsilon_is_the_decimal_that_was_meant():
    assert make().rms_norm_eps == 1e-5


def test_model_without_output_matrix_is_tied():
    assert make(shapes={"token_embd.weight": (100, 64)}).tie_word_embeddings
    assert not make().tie_word_embeddings


def test_biases_follow_from_the_tensors():
    shapes = {**SHAPES, "blk.0.attn_q.bias": (64,), "blk.0.ffn_gate.bias": (96,)}
    config = make(shapes=shapes)
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == (True, False, True)


def test_key_length_is_the_head_size():
    config = make(llama__attention__key_length=32, llama__attention__value_length=32)
    assert config.head_dim == 32


def test_linear_scaling_is_read():
    fields = {"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 4.0}
    assert make(**fields).rope.scaling == {"factor": 4.0}


def test_yarn_is_read_with_its_original_context():
    rope = make(
        llama__rope__scaling__type="yarn",
        llama__rope__scaling__factor=4.0,
        llama__rope__scaling__original_context_length=256,
    ).rope
    assert rope.scaling_type == "yarn"
    assert rope.scaling == {"factor": 4.0, "original_max_position_embeddings": 256}


def test_rope_factors_divide_the_frequencies_at_every_length():
    divisors = np.linspace(1, 8, 8, dtype=np.float32)
    rope = make(factors={"rope_freqs.weight": divisors}).rope
    assert rope.scaling_type == "longrope"
    assert rope.scaling["short_factor"] == rope.scaling["long_factor"] == divisors.tolist()
    assert rope.scaling["attention_factor"] == 1.0


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"general__architecture": "qwen2"}, ("general.architecture", "qwen2")),
        ({"llama__expert_count": 8}, ("MoE", "expert_count")),
        ({"split__count": 3}, ("split.count", "3")),
        ({"llama__block_count": None}, ("llama.block_count",)),
        ({"llama__rope__dimension_count": 8}, ("rope.dimension_count", "8")),
        ({"llama__attention__value_length": 8}, ("value_length", "8")),
        ({"llama__attention__head_count_kv": [2, 2, 1, 2]}, ("head_count_kv", "[2, 2, 1, 2]")),
        ({"llama__residual_scale": 0.5}, ("residual_scale", "0.5")),
        ({"llama__rope__scaling__type": "ntk"}, ("rope.scaling.type", "ntk")),
        ({"llama__rope__scaling__type": "longrope"}, ("rope_factors_short.weight",)),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(fields, words):
    with pytest.raises(CheckpointError) as refusal:
        make(**fields)
    for word in words:
        assert word in str(refusal.value)
