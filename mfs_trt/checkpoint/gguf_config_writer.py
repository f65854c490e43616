"""`ModelConfig` → GGUF metadata, and the rope tensors that some scalings need."""

import math
from typing import Any

import numpy as np

from mfs_trt.checkpoint.gguf_config import config_from_gguf
from mfs_trt.checkpoint.names import gguf_stored_name
from mfs_trt.errors import CheckpointError
from mfs_trt.model_config import ModelConfig, RopeConfig
from mfs_trt.tensor_names import tensor_shapes

# GGUF has no architecture of Mistral's: it is a LLaMA there.
GGUF_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}


def gguf_fields(config: ModelConfig) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Metadata (Python values, `general.architecture` aside) and rope tensors by stored name.

    A sliding window is stated by `attention.sliding_window`; llama.cpp's LLaMA does not apply it,
    so a Mistral with a window equals its export up to that many tokens there. Raises
    `CheckpointError` naming what the format cannot express.
    """
    architecture = GGUF_ARCHITECTURES[config.architecture]
    rope_values, factors = _rope(config)
    values = {
        "vocab_size": config.vocab_size,
        "block_count": config.num_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.dimension_count": config.head_dim,
        "rope.freq_base": float(config.rope.theta),
        **rope_values,
    }
    if config.windowed_layers:
        if config.windowed_layers != tuple(range(config.num_layers)) or architecture != "llama":
            raise CheckpointError(
                f"windowed_layers: a GGUF {architecture} cannot express a window on layers "
                f"{list(config.windowed_layers)} of {config.num_layers}"
            )
        values["attention.sliding_window"] = config.sliding_window
    fields = {f"{architecture}.{key}": value for key, value in values.items()}
    if architecture == "llama":
        _check(config, {"general.architecture": architecture, **fields}, factors)
    return fields, factors


def _rope(config: ModelConfig) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    rope = config.rope
    scaling = rope.scaling
    if rope.scaling_type == "default":
        return {}, {}
    if rope.scaling_type == "linear":
        return {"rope.scaling.type": "linear", "rope.scaling.factor": float(scaling["factor"])}, {}
    if rope.scaling_type == "llama3":
        return {}, {"rope_freqs.weight": llama3_factors(rope, config.head_dim)}
    if rope.scaling_type == "yarn":
        return _yarn(scaling, config.max_position_embeddings), {}
    if rope.scaling_type == "longrope":
        return _longrope(scaling, config.max_position_embeddings)
    raise CheckpointError(f"rope type: GGUF cannot express {rope.scaling_type!r}")


def _yarn(scaling: dict[str, Any], max_positions: int) -> dict[str, Any]:
    """llama.cpp multiplies YaRN's own attention factor by the file's."""
    unknown = sorted({"mscale", "mscale_all_dim", "truncate"} & set(scaling))
    if unknown:
        raise CheckpointError(f"rope type yarn: GGUF cannot express {', '.join(unknown)}")
    original = scaling["original_max_position_embeddings"]
    factor = float(scaling.get("factor") or max_positions / original)
    values: dict[str, Any] = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": factor,
        "rope.scaling.original_context_length": original,
    }
    if scaling.get("attention_factor") is not None:
        own = 0.1 * math.log(factor) + 1.0
        values["rope.scaling.attn_factor"] = scaling["attention_factor"] / own
    for key in ("beta_fast", "beta_slow"):
        if scaling.get(key) is not None:
            values[f"rope.scaling.yarn_{key}"] = float(scaling[key])
    return values


def _longrope(
    scaling: dict[str, Any], max_positions: int
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Equal factors for any length are one tensor; the attention factor is always stated."""
    short = np.asarray(scaling["short_factor"], np.float32)
    long = np.asarray(scaling["long_factor"], np.float32)
    original = scaling["original_max_position_embeddings"]
    attention = scaling.get("attention_factor")
    if attention is None:
        factor = scaling.get("factor") or max_positions / original
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    if np.array_equal(short, long) and attention == 1.0 and original == max_positions:
        return {}, {"rope_freqs.weight": short}
    values = {
        "rope.scaling.type": "longrope",
        "rope.scaling.original_context_length": original,
        "rope.scaling.attn_factor": float(attention),
    }
    return values, {"rope_factors_short.weight": short, "rope_factors_long.weight": long}


def llama3_factors(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """What Llama 3.1's scaling divides each frequency by: [head_dim / 2] float32."""
    scaling = rope.scaling
    factor, low, high = (
        float(scaling[key]) for key in ("factor", "low_freq_factor", "high_freq_factor")
    )
    exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    turns = scaling["original_max_position_embeddings"] / (2 * math.pi * rope.theta**exponents)
    share = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1.0 / ((1.0 - share) / factor + share)).astype(np.float32)


def _check(config: ModelConfig, fields: dict[str, Any], factors: dict[str, np.ndarray]) -> None:
    """Read the metadata back: what does not return would be lost without a word."""
    shapes = {gguf_stored_name(name): shape for name, shape in tensor_shapes(config).items()}
    found = config_from_gguf(fields, shapes, factors)
    for name in ("qkv_bias", "o_bias", "mlp_bias", "qk_norm", "tie_word_embeddings"):
        if getattr(found, name) != getattr(config, name):
            raise CheckpointError(
                f"{name}: a GGUF llama cannot express {getattr(config, name)} for this model"
            )
