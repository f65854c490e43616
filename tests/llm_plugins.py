"""`tensorrt_llm` as far as its plugin library goes: a `GPTAttention` that torch evaluates.

It keeps what the plugin's documentation promises: paged keys and values behind pool pointers, rows
packed with contexts first, lengths on the host.
"""

import ctypes
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod, sqrt
from typing import Any

import torch
from torch import Tensor

from mfs_trt.engine.tensorrt_api import TensorRtApi
from mfs_trt.plugins import reference
from plugin_networks import full_tensorrt

INPUTS = (  # in order
    *("qkv", "sequence_length", "host_past_key_value_lengths", "host_max_attention_window_sizes"),
    *("host_sink_token_length", "context_lengths", "cache_indirection", "host_request_types"),
    *("kv_cache_block_offsets", "host_kv_cache_block_offsets", "host_kv_cache_pool_pointers"),
    *("host_kv_cache_pool_mapping", "host_context_lengths", "host_runtime_perf_knobs"),
    "host_context_progress",
)
# Those that `gptAttentionPlugin.cpp` asks for by name, and the type it reads them as.
_FIELDS_BY_TYPE = {
    "INT32": """
        layer_idx num_heads vision_start vision_length num_kv_heads num_kv_heads_origin head_size
        unidirectional rotary_embedding_dim rotary_embedding_max_positions
        rotary_embedding_original_max_positions tp_size tp_rank kv_cache_quant_mode mask_type
        block_sparse_block_size block_sparse_num_local_blocks block_sparse_vertical_stride
        paged_kv_cache tokens_per_block type_id max_context_length max_distance use_cache
        spec_decoding_max_generation_length q_lora_rank kv_lora_rank qk_nope_head_dim
        qk_rope_head_dim v_head_dim cp_size cp_rank cp_group""",
    "FLOAT32": """
        q_scaling attn_logit_softcapping_scale rotary_embedding_base rotary_embedding_scale
        rotary_embedding_short_m_scale rotary_embedding_long_m_scale""",
    "INT8": """
        position_embedding_type rotary_embedding_scale_type unfuse_qkv_gemm use_logn_scaling
        context_fmha_type remove_input_padding block_sparse_homo_head_pattern qkv_bias_enabled
        do_cross_attention pos_shift_enabled dense_context_fmha use_paged_context_fmha
        use_fp8_context_fmha has_full_attention_mask is_spec_decoding_enabled
        spec_decoding_is_generation_length_variable is_mla_enabled fuse_fp4_quant skip_attn""",
}
FIELDS = {name: kind for kind, names in _FIELDS_BY_TYPE.items() for name in names.split()}


class GptAttention:
    name = "GPTAttention"

    def __init__(self, fields: dict[str, Any]) -> None:
        self.fields = fields

    def describe(self, inputs: Sequence[tuple[Any, tuple[int, ...]]]) -> tuple[Any, tuple]:
        """Type and shape of the output; inputs are `INPUTS`."""
        assert len(inputs) == len(INPUTS)
        (dtype, (num_rows, width)), f = inputs[0], self.fields
        assert width == (f["num_heads"] + 2 * f["num_kv_heads"]) * f["head_size"]
        assert int(dtype) == f["type_id"]
        return dtype, (num_rows, f["num_heads"] * f["head_size"])


class Creator:
    name = "GPTAttention"

    def create_plugin(self, name: str, fields: Sequence[Any]) -> GptAttention:
        """Fails on a field that is missing, strange, twice, or of another type."""
        types = sorted((field.name, field.type.name) for field in fields)
        assert types == sorted(FIELDS.items())
        for field in fields:
            assert field.data.dtype.name == field.type.name.lower() and field.data.shape == (1,)
        return GptAttention({field.name: field.data.item() for field in fields})


@contextmanager
def llm_tensorrt() -> Iterator[TensorRtApi]:
    """The API of target `tensorrt-llm`, whose library has registered its plugin."""
    sys.modules["tensorrt_llm"] = types.ModuleType("tensorrt_llm")
    try:
        with full_tensorrt("tensorrt-llm") as api:
            api.module.get_plugin_registry().register_creator(Creator(), "tensorrt_llm")
            yield api
    finally:
        del sys.modules["tensorrt_llm"]


def evaluate_gpt_attention(arguments: Sequence[Tensor], f: Mapping[str, Any]) -> tuple[Tensor]:
    """Writes keys and values where the pool's offsets say, then attends request by request."""
    given = dict(zip(INPUTS, arguments, strict=True))
    num_heads, num_kv_heads, d = f["num_heads"], f["num_kv_heads"], f["head_size"]
    q, k, v = (
        given["qkv"]
        .view(-1, num_heads + 2 * num_kv_heads, d)
        .split((num_heads, num_kv_heads, num_kv_heads), 1)
    )
    pool, layer_in_pool = given["host_kv_cache_pool_mapping"][f["layer_idx"]].tolist()
    assert layer_in_pool == 0 and given["host_sink_token_length"].tolist() == [0]
    offsets = given["kv_cache_block_offsets"][pool]
    assert torch.equal(offsets, given["host_kv_cache_block_offsets"][pool])
    shape = (int(offsets.max()) + 1, num_kv_heads, f["tokens_per_block"], d)
    address = int(given["host_kv_cache_pool_pointers"][pool, 0])
    memory = _memory(address, shape, q.dtype)
    is_generation = given["host_request_types"]
    assert (is_generation.diff() >= 0).all(), "contexts come first"
    lengths, past = given["sequence_length"], given["host_past_key_value_lengths"]
    assert torch.equal(given["context_lengths"], given["host_context_lengths"])
    counts = torch.where(is_generation.bool(), 1, given["host_context_lengths"])
    assert torch.equal(past + counts, lengths) and counts.sum() == len(q)
    out, begin = [], 0
    for r, (count, length) in enumerate(zip(counts.tolist(), lengths.tolist(), strict=True)):
        rows = slice(begin, begin + count)
        begin += count
        positions = torch.arange(length - count, length)
        block, slot = positions // f["tokens_per_block"], positions % f["tokens_per_block"]
        for kind, new in enumerate((k, v)):
            memory[offsets[r, kind][block], :, slot] = new[rows]
        keys, values = (memory[offsets[r, kind].long()] for kind in range(2))
        tables = torch.arange(len(keys))[None]
        scale = 1 / (f["q_scaling"] * sqrt(d))
        attended = reference.paged_attention(
            q[rows], keys, values, tables, [0, count], [length], scale
        )
        out.append(attended.flatten(1))
    return (torch.cat(out),)


def _memory(address: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    content = (ctypes.c_byte * (prod(shape) * dtype.itemsize)).from_address(address)
    return torch.frombuffer(content, dtype=dtype).view(shape)
