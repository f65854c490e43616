"""TensorRT-LLM's checkpoint config.json ↔ `ModelConfig` (the format of its 0.9 to 1.2 lines)."""

from typing import Any

from mfs_trt.checkpoint.hf_config import rope_from_hf
from mfs_trt.errors import CheckpointError
from mfs_trt.model_config import ModelConfig

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "LLaMAForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
# Switches of the format that change the arithmetic, with the value that changes nothing.
_NEUTRAL: dict[str, Any] = {
    "residual_mlp": False,
    "fc_after_embed": False,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "layer_idx_offset": 0,
    "embedding_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "output_multiplier_scale": 1.0,
    "use_logn_attn": False,
    "position_embedding_type": "rope_gpt_neox",
    "rotary_pct": 1.0,
}


def config_from_trtllm(data: dict[str, Any]) -> ModelConfig:
    """Read a parsed config.json; raises `CheckpointError` naming the key that cannot be served."""
    architecture = ARCHITECTURES.get(str(data.get("architecture")))
    quantization = data.get("quantization") or {}
    for key in ("quant_algo", "kv_cache_quant_algo"):
        if quantization.get(key) is not None:
            raise CheckpointError(f"quantization.{key}: expected none, got {quantization[key]!r}")
    experts = (data.get("moe") or {}).get("num_experts", data.get("moe_num_experts", 0))
    if experts:
        raise CheckpointError(
            f"moe.num_experts {experts}: a mixture of experts (MoE), expected a dense model"
        )
    if architecture is None:
        raise CheckpointError(
            f"architecture: expected one of {', '.join(ARCHITECTURES)}, "
            f"got {data.get('architecture')!r}"
        )
    for key, neutral in _NEUTRAL.items():
        if data.get(key, neutral) not in (neutral, None):
            raise CheckpointError(f"{key}: expected {neutral}, got {data[key]!r}")
    if data.get("hidden_act", "silu") not in ("silu", "swiglu"):
        raise CheckpointError(f"hidden_act: expected silu, got {data['hidden_act']!r}")

    def required(key: str) -> Any:
        if data.get(key) is None:
            raise CheckpointError(f"config.json: expected the key {key!r}, which is missing")
        return data[key]

    num_heads, hidden_size = required("num_attention_heads"), required("hidden_size")
    max_positions = required("max_position_embeddings")
    is_qwen = architecture in ("qwen2", "qwen3")
    has_bias = bool(data.get("attn_bias", architecture == "qwen2"))
    rope = rope_from_hf(
        {"rope_theta": data.get("rotary_base"), "rope_scaling": data.get("rotary_scaling")},
        max_positions,
    )
    return ModelConfig(
        architecture=architecture,
        vocab_size=required("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=required("intermediate_size"),
        num_layers=required("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=data.get("num_key_value_heads") or num_heads,
        head_dim=data.get("head_size") or hidden_size // num_heads,
        rms_norm_eps=data.get("norm_epsilon", 1e-5),
        rope=rope,
        max_position_embeddings=max_positions,
        qkv_bias=has_bias,
        o_bias=has_bias and not is_qwen,  # Qwen's output projection never has one
        mlp_bias=bool(data.get("mlp_bias", False)),
        qk_norm=architecture == "qwen3",
        tie_word_embeddings=bool(
            data.get("tie_word_embeddings") or data.get("share_embedding_table")
        ),
        sliding_window=data.get("sliding_window"),
        windowed_layers=tuple(data.get("windowed_layers") or ()),
    )


def config_to_trtllm(config: ModelConfig, dtype: str, tp_size: int) -> dict[str, Any]:
    """The config.json of an unquantised checkpoint for `tp_size` ranks.

    `sliding_window` and `windowed_layers` are keys of ours beside the format's, which takes windows
    at run time. Raises `CheckpointError` naming what the format cannot express.
    """
    is_qwen = config.architecture in ("qwen2", "qwen3")
    if config.o_bias != (config.qkv_bias and not is_qwen):
        raise CheckpointError(
            f"o_bias: a TensorRT-LLM {config.architecture} checkpoint cannot express "
            f"qkv_bias {config.qkv_bias} with o_bias {config.o_bias}"
        )
    names = {ours: theirs for theirs, ours in reversed(ARCHITECTURES.items())}
    scaling = None
    if config.rope.scaling_type != "default":
        kind = config.rope.scaling_type
        scaling = {"type": kind, "rope_type": kind, **config.rope.scaling}
    data: dict[str, Any] = {
        "architecture": names[config.architecture],
        "dtype": dtype,
        "logits_dtype": "float32",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_size": config.head_dim,
        "hidden_act": "silu",
        "norm_epsilon": config.rms_norm_eps,
        "position_embedding_type": "rope_gpt_neox",
        "max_position_embeddings": config.max_position_embeddings,
        "rotary_base": config.rope.theta,
        "rotary_scaling": scaling,
        "attn_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
        "tie_word_embeddings": config.tie_word_embeddings,
        "use_parallel_embedding": False,
        "embedding_sharding_dim": 0,
        "quantization": {"quant_algo": None, "kv_cache_quant_algo": None},
        "mapping": {"world_size": tp_size, "tp_size": tp_size, "pp_size": 1},
    }
    if is_qwen:
        data["qwen_type"] = config.architecture
    if config.windowed_layers:
        data["sliding_window"] = config.sliding_window
        data["windowed_layers"] = list(config.windowed_layers)
    return data
