import pytest
import transformers

from mfs_trt.checkpoint.hf_config import config_from_hf, rope_from_hf
from mfs_trt.errors import CheckpointError

BASE = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}


def make(**overrides):
    return config_from_hf({**BASE, **overrides})


@pytest.mark.parametrize(
    ("model_type", "config_class"),
    [
        ("llama", transformers.LlamaConfig),
        ("mistral", transformers.MistralConfig),
        ("qwen2", transformers.Qwen2Config),
        ("qwen3", transformers.Qwen3Config),
    ],
)
def test_missing_keys_get_the_defaults_of_transformers(model_type, config_class):
    sizes = {key: value for key, value in BASE.items() if key != "model_type"}
    sizes["num_attention_heads"], sizes["hidden_size"] = 32, 256
    theirs = config_class(**sizes)
    ours = config_from_hf({**sizes, "model_type": model_type})
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == getattr(theirs, "head_dim", 256 // 32)
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.sliding_window == getattr(theirs, "sliding_window", None)


def test_old_and_new_spelling_of_rope_mean_the_same():
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 8192
    old = rope_from_hf(
        {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", **scaling}}, 131072
    )
    new = rope_from_hf(
        {"rope_parameters": {"rope_theta": 500000.0, "rope_type": "llama3", **scaling}}, 131072
    )
    assert old == new
    assert old.theta == 500000.0
    assert old.scaling == scaling


def test_rope_type_may_be_spelt_type():
    rope = rope_from_hf({"rope_scaling": {"type": "linear", "factor": 2.0}}, 512)
    assert (rope.scaling_type, rope.scaling) == ("linear", {"factor": 2.0})


def test_su_is_longrope():
    factors = {"short_factor": [1.0], "long_factor": [2.0]}
    rope = rope_from_hf({"rope_scaling": {"type": "su", **factors}}, 512)
    assert rope.scaling_type == "longrope"


def test_original_context_defaults_to_max_position_embeddings():
    rope = rope_from_hf({"rope_scaling": {"type": "yarn", "factor": 4.0}}, 32768)
    assert rope.scaling["original_max_position_embeddings"] == 32768


def test_original_context_beside_the_rope_settings_wins():
    data = {"rope_scaling": {"type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 7}
    assert rope_from_hf(data, 32768).scaling["original_max_position_embeddings"] == 7


def test_mistral_windows_every_layer():
    config = make(model_type="mistral", num_key_value_heads=2, sliding_window=16)
    assert [config.layer_window(i) for i in range(4)] == [16] * 4


def test_mistral_without_window_attends_to_everything():
    config = make(model_type="mistral", num_key_value_heads=2, sliding_window=None)
    assert config.windowed_layers == ()


def test_qwen_windows_only_layers_from_max_window_layers():
    config = make(
        model_type="qwen2",
        num_key_value_heads=2,
        use_sliding_window=True,
        sliding_window=16,
        max_window_layers=3,
    )
    assert [config.layer_window(i) for i in range(4)] == [None, None, None, 16]


def test_qwen_layer_types_say_which_layers_have_a_window():
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    config = make(
        model_type="qwen3",
        num_key_value_heads=2,
        use_sliding_window=True,
        sliding_window=16,
        layer_types=kinds,
    )
    assert config.windowed_layers == (0, 2)


def test_qwen_window_needs_use_sliding_window():
    config = make(model_type="qwen2", num_key_value_heads=2, sliding_window=16)
    assert (config.sliding_window, config.windowed_layers) == (None, ())


@pytest.mark.parametrize(
    ("overrides", "flags"),
    [
        ({"model_type": "llama"}, (False, False, False, False)),
        ({"model_type": "llama", "attention_bias": True}, (True, True, False, False)),
        ({"model_type": "llama", "mlp_bias": True}, (False, False, True, False)),
        ({"model_type": "mistral"}, (False, False, False, False)),
        ({"model_type": "qwen2"}, (True, False, False, False)),
        ({"model_type": "qwen3"}, (False, False, False, True)),
        ({"model_type": "qwen3", "attention_bias": True}, (True, True, False, True)),
    ],
)
def test_biases_and_qk_norm_follow_the_architecture(overrides, flags):
    config = make(num_key_value_heads=2, **overrides)
    assert (config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm) == flags


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"model_type": "mixtral"}, ("MoE", "mixtral")),
        ({"model_type": "qwen3_moe", "num_experts": 8}, ("MoE", "qwen3_moe")),
        ({"num_local_experts": 8}, ("MoE",)),
        ({"model_type": "gemma2"}, ("model_type", "gemma2")),
        ({"model_type": None}, ("model_type",)),
        ({"quantization_config": {"quant_method": "gptq"}}, ("quantization_config", "gptq")),
        ({"architectures": ["LlamaForSequenceClassification"]}, ("SequenceClassification",)),
        ({"hidden_act": "gelu"}, ("hidden_act", "gelu")),
        ({"vocab_size": None}, ("vocab_size",)),
        ({"vocab_size": "many"}, ("vocab_size", "many")),
        ({"num_key_value_heads": 3}, ("num_kv_heads", "3")),
        ({"head_dim": 7}, ("head_dim", "7")),
        ({"partial_rotary_factor": 0.5}, ("partial_rotary_factor", "0.5")),
        ({"rope_scaling": {"type": "mrope"}}, ("rope type", "mrope")),
        ({"rope_scaling": {"type": "linear"}}, ("linear", "factor")),
        ({"rope_parameters": {"full_attention": {}}}, ("rope_parameters", "full_attention")),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(overrides, words):
    with pytest.raises(CheckpointError) as refusal:
        make(**overrides)
    for word in words:
        assert word in str(refusal.value)


def test_unknown_layer_type_is_refused_by_name():
    with pytest.raises(CheckpointError, match="chunked_attention"):
        make(model_type="qwen3", num_key_value_heads=2, layer_types=["chunked_attention"] * 4)
