import pytest

from mfs_trt.checkpoint.trtllm_config import config_from_trtllm, config_to_trtllm
from mfs_trt.errors import CheckpointError
from mfs_trt.model_config import ModelConfig, RopeConfig

BASE = {
    "architecture": "LlamaForCausalLM",
    "dtype": "float16",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "norm_epsilon": 1e-6,
    "rotary_base": 500000.0,
    "position_embedding_type": "rope_gpt_neox",
    "hidden_act": "silu",
    "quantization": {"quant_algo": None},
    "mapping": {"world_size": 1, "tp_size": 1, "pp_size": 1},
}


def make(**overrides) -> ModelConfig:
    return config_from_trtllm({**BASE, **overrides})


def test_fields_are_read():
    config = make()
    assert (config.architecture, config.head_dim, config.num_kv_heads) == ("llama", 16, 2)
    assert config.rope == RopeConfig(theta=500000.0)


@pytest.mark.parametrize(
    ("overrides", "flags"),
    [
        ({}, (False, False, False)),
        ({"attn_bias": True, "mlp_bias": True}, (True, True, True)),
        ({"architecture": "Qwen2ForCausalLM"}, (True, False, False)),
        ({"architecture": "Qwen3ForCausalLM"}, (False, False, False)),
    ],
)
def test_biases_follow_the_architecture(overrides, flags):
    config = make(**overrides)
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == flags


def test_shared_embedding_table_is_tied():
    assert make(share_embedding_table=True).tie_word_embeddings


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"quantization": {"quant_algo": "W4A16_AWQ"}}, ("quant_algo", "W4A16_AWQ")),
        ({"quantization": {"kv_cache_quant_algo": "FP8"}}, ("kv_cache_quant_algo", "FP8")),
        ({"moe": {"num_experts": 8}}, ("MoE", "8")),
        ({"architecture": "GPTForCausalLM"}, ("architecture", "GPTForCausalLM")),
        ({"position_embedding_type": "alibi"}, ("position_embedding_type", "alibi")),
        ({"layer_idx_offset": 2}, ("layer_idx_offset", "2")),
        ({"residual_multiplier": 0.5}, ("residual_multiplier", "0.5")),
        ({"hidden_act": "gelu"}, ("hidden_act", "gelu")),
        ({"max_position_embeddings": None}, ("max_position_embeddings",)),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(overrides, words):
    with pytest.raises(CheckpointError) as refusal:
        make(**overrides)
    for word in words:
        assert word in str(refusal.value)


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"architecture": "mistral", "sliding_window": 16, "windowed_layers": (0, 1, 2, 3)},
        {"architecture": "qwen2", "qkv_bias": True, "tie_word_embeddings": True},
        {"architecture": "qwen3", "qk_norm": True, "head_dim": 32},
        {"qkv_bias": True, "o_bias": True, "mlp_bias": True},
        {"rope": RopeConfig(1e6, "linear", {"factor": 2.0})},
        {
            "rope": RopeConfig(
                1e6,
                "llama3",
                {
                    "factor": 8.0,
                    "high_freq_factor": 4.0,
                    "low_freq_factor": 1.0,
                    "original_max_position_embeddings": 128,
                },
            )
        },
    ],
)
def test_what_is_written_is_read_back(overrides):
    config = ModelConfig(
        **{
            "architecture": "llama",
            "vocab_size": 100,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_layers": 4,
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 16,
            "rms_norm_eps": 1e-6,
            "rope": RopeConfig(),
            "max_position_embeddings": 512,
            **overrides,
        }
    )
    assert config_from_trtllm(config_to_trtllm(config, "float16", 2)) == config


def test_bias_that_the_format_cannot_express_is_refused_by_name():
    config = make(architecture="Qwen3ForCausalLM", attn_bias=True)
    unlike = ModelConfig(**{**config.__dict__, "o_bias": True})
    with pytest.raises(CheckpointError, match="o_bias"):
        config_to_trtllm(unlike, "float16", 1)
