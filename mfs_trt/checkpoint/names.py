"""Tensor names of other formats ↔ ours: tables, one row a module.

`hf_name` and `gguf_name` return None for a tensor that holds no weights (a buffer of frequencies),
and an unknown name unchanged, so that the check of the checkpoint can name it.
"""

import re

from mfs_trt.tensor_names import EMBEDDING, FINAL_NORM, LM_HEAD

_HF_BUFFERS = (".rotary_emb.inv_freq", ".masked_bias")
_LAYER = re.compile(r"(.*?\.)(\d+)\.(.+)")


def hf_name(stored: str) -> str | None:
    """`model.layers.3.mlp.up_proj.weight` → `layers.3.mlp.up_proj.weight`."""
    if stored.endswith(_HF_BUFFERS):
        return None
    return stored.removeprefix("model.")


_GGUF_TOP = {
    "token_embd.weight": EMBEDDING,
    "output_norm.weight": FINAL_NORM,
    "output.weight": LM_HEAD,
}
_GGUF_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GGUF_ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def gguf_name(stored: str) -> str | None:
    """`blk.3.ffn_up.weight` → `layers.3.mlp.up_proj.weight`; rope factors belong to the config."""
    if stored in GGUF_ROPE_TENSORS or stored.endswith(".attn_rot_embd.weight"):
        return None
    if stored in _GGUF_TOP:
        return _GGUF_TOP[stored]
    match = _LAYER.fullmatch(stored)
    if match and match[1] == "blk.":
        module, _, kind = match[3].rpartition(".")
        if module in _GGUF_MODULES:
            return f"layers.{match[2]}.{_GGUF_MODULES[module]}.{kind}"
    return stored


def gguf_stored_name(name: str) -> str:
    """`layers.3.mlp.up_proj.weight` → `blk.3.ffn_up.weight`."""
    for stored, ours in _GGUF_TOP.items():
        if ours == name:
            return stored
    _, layer, rest = name.split(".", 2)
    module, _, kind = rest.rpartition(".")
    (stored,) = (stored for stored, ours in _GGUF_MODULES.items() if ours == module)
    return f"blk.{layer}.{stored}.{kind}"


TRTLLM_TOP = {
    EMBEDDING: "transformer.vocab_embedding.weight",
    FINAL_NORM: "transformer.ln_f.weight",
    LM_HEAD: "lm_head.weight",
}
_TRTLLM_MODULES = {
    "input_layernorm": "input_layernorm",
    "self_attn.q_proj": "attention.qkv",
    "self_attn.k_proj": "attention.qkv",
    "self_attn.v_proj": "attention.qkv",
    "self_attn.q_norm": "attention.q_layernorm",
    "self_attn.k_norm": "attention.k_layernorm",
    "self_attn.o_proj": "attention.dense",
    "post_attention_layernorm": "post_layernorm",
    "mlp.gate_proj": "mlp.fc",
    "mlp.up_proj": "mlp.gate",
    "mlp.down_proj": "mlp.proj",
}


def trtllm_name(name: str) -> str:
    """The rank tensor that holds ours: `layers.3.mlp.up_proj.bias` → `…layers.3.mlp.gate.bias`."""
    if name in TRTLLM_TOP:
        return TRTLLM_TOP[name]
    _, layer, rest = name.split(".", 2)
    module, _, kind = rest.rpartition(".")
    return f"transformer.layers.{layer}.{_TRTLLM_MODULES[module]}.{kind}"
