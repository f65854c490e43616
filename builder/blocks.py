"""The blocks of a decoder layer, each as calls on an `Emitter`."""

from mfs_trt.builder.emitter import Emitter, Tensor
from mfs_trt.model_config import ModelConfig


def decoder_layer(
    emit: Emitter[Tensor],
    model: ModelConfig,
    layer: int,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    group: int,
    index_in_group: int,
) -> Tensor:
    """Pre-norm attention and MLP with residuals: x [num_rows, hidden] → the same shape."""
    prefix = f"layers.{layer}."
    h = emit.rms_norm(x, emit.weight(prefix + "input_layernorm.weight"), model.rms_norm_eps)
    projections = [prefix + f"self_attn.{name}_proj" for name in "qkv"]
    query, key, value = emit.linears(h, projections, model.qkv_bias)
    query = _position(emit, model, prefix + "self_attn.q_norm", query, model.num_heads, cos, sin)
    key = _position(emit, model, prefix + "self_attn.k_norm", key, model.num_kv_heads, cos, sin)
    attended = emit.paged_attention(
        query,
        key,
        value,
        group=group,
        index_in_group=index_in_group,
        window=model.layer_window(layer),
    )
    x = emit.add(x, _linear(emit, attended, prefix + "self_attn.o_proj", model.o_bias))
    return emit.add(x, _mlp(emit, model, prefix, x))


def _mlp(emit: Emitter[Tensor], model: ModelConfig, prefix: str, x: Tensor) -> Tensor:
    gain = emit.weight(prefix + "post_attention_layernorm.weight")
    h = emit.rms_norm(x, gain, model.rms_norm_eps)
    gate, up = (prefix + f"mlp.{name}_proj" for name in ("gate", "up"))
    inner = emit.swiglu(h, gate, up, model.mlp_bias)
    return _linear(emit, inner, prefix + "mlp.down_proj", model.mlp_bias)


def _position(
    emit: Emitter[Tensor],
    model: ModelConfig,
    norm: str,
    x: Tensor,
    num_heads: int,
    cos: Tensor,
    sin: Tensor,
) -> Tensor:
    """Optional QK norm over each head, then the rotary embedding."""
    heads = emit.split_heads(x, num_heads)
    if model.qk_norm:
        heads = emit.rms_norm(heads, emit.weight(norm + ".weight"), model.rms_norm_eps)
    return emit.merge_heads(emit.rotary_embedding(heads, cos, sin))


def _linear(emit: Emitter[Tensor], x: Tensor, name: str, has_bias: bool) -> Tensor:
    bias = emit.weight(name + ".bias") if has_bias else None
    return emit.linear(x, emit.weight(name + ".weight"), bias)
