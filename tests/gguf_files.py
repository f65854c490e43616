"""Small GGUF files for tests, written by the `gguf` package from tiny Hugging Face models."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

from mfs_trt.checkpoint.hf import HfCheckpoint
from mfs_trt.model_config import ModelConfig
from mfs_trt.tensor_names import tensor_shapes

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 16,
}  # rows of whole 32-value blocks
_TOP = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
_MODULES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_tensor_name(name: str) -> str:
    module, _, kind = name.rpartition(".")
    if module in _TOP:
        return f"{_TOP[module]}.{kind}"
    _, layer, rest = module.split(".", 2)
    return f"blk.{layer}.{_MODULES[rest]}.{kind}"


def permuted(array: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's conversion of q and k: halves of each head → adjacent pairs."""
    halves = array.reshape(num_heads, 2, array.shape[0] // num_heads // 2, *array.shape[1:])
    return halves.swapaxes(1, 2).reshape(array.shape)


def write_gguf(
    path: Path,
    hf_folder: Path,
    kind: str = "F32",
    *,
    extra_tensors: Mapping[str, np.ndarray] | None = None,
    **fields,
) -> Path:
    """Matrices as `kind`, vectors as F32; `fields`: more metadata, with `__` for `.`."""
    reader = HfCheckpoint(hf_folder)
    writer = GGUFWriter(path, "llama")
    for key, value in {**model_fields(reader.config), **fields}.items():
        _add_field(writer, key.replace("__", "."), value)
    for name in tensor_shapes(reader.config):
        array = reader.load(name).float().numpy()
        if ".q_proj." in name:
            array = permuted(array, reader.config.num_heads)
        elif ".k_proj." in name:
            array = permuted(array, reader.config.num_kv_heads)
        _add_tensor(writer, gguf_tensor_name(name), array, kind if array.ndim == 2 else "F32")
    for name, array in (extra_tensors or {}).items():
        _add_tensor(writer, name, array, "F32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def model_fields(config: ModelConfig) -> dict:
    return {
        "llama.block_count": config.num_layers,
        "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_heads,
        "llama.attention.head_count_kv": config.num_kv_heads,
        "llama.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "llama.rope.freq_base": config.rope.theta,
        "llama.rope.dimension_count": config.head_dim,
        "llama.vocab_size": config.vocab_size,
    }


def _add_field(writer: GGUFWriter, key: str, value) -> None:
    if value is None:
        return
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _add_tensor(writer: GGUFWriter, name: str, array: np.ndarray, kind: str) -> None:
    qtype = GGMLQuantizationType[kind]
    writer.add_tensor(name, quantize(np.ascontiguousarray(array), qtype), raw_dtype=qtype)
