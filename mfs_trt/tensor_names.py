"""The tensors of one decoder in our names, with the shapes that its `ModelConfig` implies.

Matrices are `[out, in]` as in Hugging Face. The final norm is `norm.weight` here; in a family
folder it is the exit norm of the top tier.
"""

from mfs_trt.model_config import ModelConfig

EMBEDDING = "embed_tokens.weight"
FINAL_NORM = "norm.weight"
LM_HEAD = "lm_head.weight"


def exit_norm(exit_layer: int) -> str:
    return f"exits.{exit_layer}.norm.weight"


def exit_head(exit_layer: int) -> str:
    return f"exits.{exit_layer}.lm_head.weight"


def layer_tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name within a layer → shape, in the order in which tensors are written."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_rows = config.num_heads * config.head_dim
    kv_rows = config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,)}
    for name, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows)):
        shapes[f"self_attn.{name}_proj.weight"] = (rows, hidden)
        if config.qkv_bias:
            shapes[f"self_attn.{name}_proj.bias"] = (rows,)
    if config.qk_norm:
        shapes["self_attn.q_norm.weight"] = (config.head_dim,)
        shapes["self_attn.k_norm.weight"] = (config.head_dim,)
    shapes["self_attn.o_proj.weight"] = (hidden, q_rows)
    if config.o_bias:
        shapes["self_attn.o_proj.bias"] = (hidden,)
    shapes["post_attention_layernorm.weight"] = (hidden,)
    for name, shape in (
        ("gate", (inner, hidden)),
        ("up", (inner, hidden)),
        ("down", (hidden, inner)),
    ):
        shapes[f"mlp.{name}_proj.weight"] = shape
        if config.mlp_bias:
            shapes[f"mlp.{name}_proj.bias"] = shape[:1]
    return shapes


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the decoder: name → shape; `lm_head.weight` only when it is not tied."""
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, config.hidden_size)}
    per_layer = layer_tensor_shapes(config)
    for layer in range(config.num_layers):
        shapes.update({f"layers.{layer}.{name}": shape for name, shape in per_layer.items()})
    shapes[FINAL_NORM] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        shapes[LM_HEAD] = (config.vocab_size, config.hidden_size)
    return shapes
