"""GGUF metadata of the LLaMA architecture → `ModelConfig`."""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from mfs_trt.errors import CheckpointError
from mfs_trt.model_config import ModelConfig, RopeConfig

# Keys that change the arithmetic in other models of this architecture, with their neutral value.
_NEUTRAL = {
    "attention.scale": 0.0,
    "logit_scale": 0.0,
    "residual_scale": 0.0,
    "embedding_scale": 0.0,
    "attention.clamp_kqv": 0.0,
    "attn_logit_softcapping": 0.0,
    "final_logit_softcapping": 0.0,
}


def config_from_gguf(
    fields: Mapping[str, Any],
    tensor_shapes: Mapping[str, tuple[int, ...]],
    rope_factors: Mapping[str, np.ndarray],
) -> ModelConfig:
    """Read the metadata `fields`; biases, tying and vocabulary follow from the tensors.

    `rope_factors` holds the file's rope tensors: divisors of the frequencies [head_dim / 2]. Raises
    `CheckpointError` naming the key that cannot be served.
    """
    architecture = fields.get("general.architecture")
    if fields.get("split.count", 1) > 1:
        raise CheckpointError(
            f"split.count: expected one file, got one of {fields['split.count']}; merge them first"
        )
    if architecture != "llama":
        raise CheckpointError(f"general.architecture: expected llama, got {architecture!r}")
    if fields.get("llama.expert_count", 0):
        raise CheckpointError(
            f"llama.expert_count {fields['llama.expert_count']}: a mixture of experts (MoE), "
            "expected a dense model"
        )

    def value(key: str, default: Any = None) -> Any:
        found = fields.get(f"llama.{key}", default)
        if found is None:
            raise CheckpointError(f"llama.{key}: expected in the metadata, which does not have it")
        if isinstance(found, list):
            if len(set(found)) != 1:
                raise CheckpointError(
                    f"llama.{key}: expected one value for all layers, got {found}"
                )
            return found[0]
        return found

    for key, neutral in _NEUTRAL.items():
        if value(key, neutral) != neutral:
            raise CheckpointError(f"llama.{key}: not supported, got {value(key)}")
    num_heads, hidden_size = value("attention.head_count"), value("embedding_length")
    head_dim = value("attention.key_length", hidden_size // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if value(key, head_dim) != head_dim:
            raise CheckpointError(
                f"llama.{key}: expected the head size {head_dim}, got {value(key)}"
            )
    if "token_embd.weight" not in tensor_shapes:
        raise CheckpointError("missing tensors: token_embd.weight")
    num_layers, context_length = value("block_count"), value("context_length")
    window = value("attention.sliding_window", 0) or None
    return ModelConfig(
        architecture="llama",
        vocab_size=tensor_shapes["token_embd.weight"][0],
        hidden_size=hidden_size,
        intermediate_size=value("feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=value("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        rms_norm_eps=_shortest(value("attention.layer_norm_rms_epsilon")),
        rope=_rope(value, set(fields), rope_factors, context_length),
        max_position_embeddings=context_length,
        qkv_bias="blk.0.attn_q.bias" in tensor_shapes,
        o_bias="blk.0.attn_output.bias" in tensor_shapes,
        mlp_bias="blk.0.ffn_gate.bias" in tensor_shapes,
        tie_word_embeddings="output.weight" not in tensor_shapes,
        sliding_window=window,
        windowed_layers=tuple(range(num_layers)) if window else (),
    )


def _rope(
    value: Any, keys: Collection[str], factors: Mapping[str, np.ndarray], context_length: int
) -> RopeConfig:
    """Divisors given as a tensor (Llama 3) are `longrope` with equal short and long factors."""
    theta = _shortest(value("rope.freq_base", 10000.0))
    factor = _shortest(value("rope.scaling.factor", value("rope.scale_linear", 0.0))) or 1.0
    default_kind = "linear" if factor != 1.0 else "none"
    kind = value("rope.scaling.type", default_kind)
    original = value("rope.scaling.original_context_length", context_length)
    attention = _shortest(value("rope.scaling.attn_factor", 1.0))
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise CheckpointError(
            f"llama.rope.scaling.type: expected none, linear, yarn or longrope, got {kind!r}"
        )
    if kind == "none":
        factor = 1.0
    if kind == "longrope" or factors:
        if kind == "yarn":
            raise CheckpointError("llama.rope.scaling.type: expected no yarn beside rope factors")
        any_factors = factors.get("rope_freqs.weight")
        short = factors.get("rope_factors_short.weight", any_factors)
        long = factors.get("rope_factors_long.weight", any_factors)
        if short is None or long is None:
            raise CheckpointError(
                "missing tensors: rope_factors_short.weight, rope_factors_long.weight"
            )
        divided = factor if kind == "linear" else 1.0
        scaling = {
            "short_factor": [float(x) * divided for x in short],
            "long_factor": [float(x) * divided for x in long],
            "original_max_position_embeddings": original,
            "attention_factor": attention,
        }
        return RopeConfig(theta, "longrope", scaling)
    if kind == "linear" and factor != 1.0:
        return RopeConfig(theta, "linear", {"factor": factor})
    if kind == "yarn":
        scaling = {"factor": factor, "original_max_position_embeddings": original}
        if attention != 1.0:  # on top of YaRN's own
            scaling["attention_factor"] = (0.1 * float(np.log(factor)) + 1.0) * attention
        for ours, theirs in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
            key = f"rope.scaling.{theirs}"
            if f"llama.{key}" in keys:
                scaling[ours] = _shortest(value(key))
        return RopeConfig(theta, "yarn", scaling)
    return RopeConfig(theta)


def _shortest(number: float) -> float:
    """A float32 of the file as the shortest decimal that means it: 9.99999974e-06 was 1e-05."""
    return float(str(np.float32(number)))
