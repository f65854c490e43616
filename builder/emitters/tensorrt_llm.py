"""Attention by the `GPTAttention` plugin of tensorrt-llm 1.x, the last line with TensorRT plugins.

The plugin keeps its paged keys and values outside the network and is told of them on the host.
Names, order and meaning of its inputs and fields: `tensorrt_llm/functional.py` (`gpt_attention`)
and `gptAttentionPlugin.cpp` of TensorRT-LLM. Its TensorRT (10.13) has no native rotary embedding.
"""

from typing import Any

import numpy as np
import torch

from mfs_trt.builder.emitters.tensorrt import TensorRtEmitter
from mfs_trt.builder.emitters.tensorrt_layers import Tensor, TensorRtLayers
from mfs_trt.engine.interface import EngineLimits, KVCacheSpec
from mfs_trt.engine.tensorrt_api import TensorRtApi
from mfs_trt.errors import ConfigError
from mfs_trt.model_config import ModelConfig

_CAUSAL, _FUSED_CONTEXT, _NO_POSITIONS = 1, 1, 0  # AttentionMaskType, ContextFMHAType, …
_NUM_PERF_KNOBS = 16


def check_model(model: ModelConfig, block_size: int) -> None:
    """Raises `ConfigError` where the plugin's paged keys and values are not laid out as ours."""
    if any(model.layer_window(layer) for layer in range(model.num_layers)):
        raise ConfigError(
            "target tensorrt-llm: expected a model without sliding windows, since its plugin "
            "overwrites keys outside of them; target tensorrt serves windows"
        )
    if block_size & (block_size - 1):
        raise ConfigError(
            f"block_size: expected a power of two for target tensorrt-llm, got {block_size}"
        )


def find_creator(api: TensorRtApi) -> Any:
    """The creator of `GPTAttention`; raises `ConfigError` when the library has none."""
    creator = api.module.get_plugin_registry().get_plugin_creator(
        "GPTAttention", "1", "tensorrt_llm"
    )
    if creator is None:
        raise ConfigError(
            "target tensorrt-llm: its plugin library has no GPTAttention; expected tensorrt-llm 1.x"
        )
    return creator


class GptAttention:
    """Rows are packed, those of several a request before those of one, as the plugin wants.

    Inputs of its own are those of `engine.tensorrt_llm`; a pool of it is one layer of the segment.
    """

    def __init__(
        self,
        layers: TensorRtLayers,
        model: ModelConfig,
        kv_spec: KVCacheSpec,
        num_groups: int,
        limits: EngineLimits,
        creator: Any,
    ) -> None:
        self._layers, self._model, self._kv_spec = layers, model, kv_spec
        self._limits, self._creator = limits, creator
        self._num_layers = num_groups * kv_spec.group_size

    def paged_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        group: int,
        index_in_group: int,
        window: int | None,
    ) -> Tensor:
        layers = self._layers
        joined = layers.network.add_concatenation([query, key, value])
        joined.axis = 1
        ordered = layers.input("attention_rows", "int32", (-1,))
        qkv = layers.gather(joined.get_output(0), ordered)
        layer_idx = group * self._kv_spec.group_size + index_in_group
        plugin = self._creator.create_plugin("attention", self._fields(layer_idx))
        if plugin is None:
            raise ConfigError(
                f"target tensorrt-llm: no GPTAttention for {self._model.num_heads} heads of "
                f"{self._model.head_dim}: {layers.api.last_error()}"
            )
        attended = layers.network.add_plugin_v2([qkv, *self._inputs()], plugin).get_output(0)
        return layers.gather(attended, layers.input("row_queries", "int32", (-1,)))

    def tier_exit(self, rows: Tensor, tiers: Tensor, gains: Tensor, eps: float) -> Tensor:
        return self._layers.gathered_exit(rows, tiers, gains, eps)

    def configure(self, settings: Any) -> None:
        pass

    def _inputs(self) -> list[Tensor]:
        """After `qkv` [num_rows, (heads + 2 * kv_heads) * d]; `host_…` are read on the host."""
        offsets = (self._num_layers, -1, 2, -1)
        shapes: dict[str, tuple[str, tuple[int, ...]]] = {
            "sequence_length": ("int32", (-1,)),
            "host_past_key_value_lengths": ("int32", (-1,)),
            "host_max_attention_window_sizes": ("int32", (self._num_layers,)),
            "host_sink_token_length": ("int32", (1,)),
            "context_lengths": ("int32", (-1,)),
            "cache_indirection": ("int32", (-1, 1, self._limits.max_model_len)),
            "host_request_types": ("int32", (-1,)),
            "kv_cache_block_offsets": ("int32", offsets),
            "host_kv_cache_block_offsets": ("int32", offsets),
            "host_kv_cache_pool_pointers": ("int64", (self._num_layers, 2)),
            "host_kv_cache_pool_mapping": ("int32", (self._num_layers, 2)),
            "host_context_lengths": ("int32", (-1,)),
            "host_runtime_perf_knobs": ("int64", (_NUM_PERF_KNOBS,)),
            "host_context_progress": ("int64", (1,)),
        }
        return [self._layers.input(name, *given) for name, given in shapes.items()]

    def _fields(self, layer_idx: int) -> Any:
        trt, model = self._layers.trt, self._model
        numbers = {
            "layer_idx": layer_idx,
            "num_heads": model.num_heads,
            "vision_start": -1,
            "vision_length": -1,
            "num_kv_heads": model.num_kv_heads,
            "num_kv_heads_origin": model.num_kv_heads,
            "head_size": model.head_dim,
            "unidirectional": 1,
            "rotary_embedding_dim": 0,  # queries and keys come rotated
            "rotary_embedding_max_positions": self._limits.max_model_len,
            "rotary_embedding_original_max_positions": self._limits.max_model_len,
            "tp_size": 1,
            "tp_rank": 0,
            "kv_cache_quant_mode": 0,
            "mask_type": _CAUSAL,
            "block_sparse_block_size": 64,
            "block_sparse_num_local_blocks": 16,
            "block_sparse_vertical_stride": 8,
            "paged_kv_cache": 1,
            "tokens_per_block": self._kv_spec.block_size,
            "type_id": int(self._layers.dtype),
            "max_context_length": self._limits.max_model_len,
            "max_distance": 0,
            "use_cache": 1,
            "spec_decoding_max_generation_length": 0,
            **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim"), 0),
            **dict.fromkeys(("qk_rope_head_dim", "v_head_dim"), 0),
            "cp_size": 1,
            "cp_rank": 0,
            "cp_group": 0,
        }
        factors = {
            "q_scaling": 1.0,  # of the square root of head_size
            "attn_logit_softcapping_scale": 0.0,
            "rotary_embedding_base": 10000.0,
            "rotary_embedding_scale": 1.0,
            "rotary_embedding_short_m_scale": 1.0,
            "rotary_embedding_long_m_scale": 1.0,
        }
        flags = {
            "position_embedding_type": _NO_POSITIONS,
            "rotary_embedding_scale_type": 0,
            "context_fmha_type": _FUSED_CONTEXT,
            "remove_input_padding": 1,
            "use_paged_context_fmha": 1,  # a chunk sees what earlier ones wrote
            **dict.fromkeys(_OFF, 0),
        }
        types, fields = trt.PluginFieldType, []
        for values, dtype, kind in (
            (numbers, np.int32, types.INT32),
            (factors, np.float32, types.FLOAT32),
            (flags, np.int8, types.INT8),
        ):
            fields += [trt.PluginField(n, np.array([v], dtype), kind) for n, v in values.items()]
        return trt.PluginFieldCollection(fields)


_OFF = (
    *("unfuse_qkv_gemm", "block_sparse_homo_head_pattern", "qkv_bias_enabled"),
    *("do_cross_attention", "pos_shift_enabled", "dense_context_fmha", "use_fp8_context_fmha"),
    *("has_full_attention_mask", "is_spec_decoding_enabled", "is_mla_enabled", "fuse_fp4_quant"),
    *("spec_decoding_is_generation_length_variable", "skip_attn", "use_logn_scaling"),
)


class TensorRtLlmEmitter(TensorRtEmitter):
    """Rotates by gathers and products: y = x · cos + (halves of x swapped) · (-sin, sin)."""

    def rotary_embedding(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half, kinds = x.shape[2] // 2, self.trt.ElementWiseOperation
        twice = self.constant(torch.arange(half, dtype=torch.int32).repeat(2))
        swapped = self.constant(torch.arange(2 * half, dtype=torch.int32).roll(half))
        ones = torch.ones(half, dtype=torch.float32)
        signs = self.cast(self.constant(torch.cat([-ones, ones])[None]), self.dtype)
        sin = self.elementwise(self.gather(sin, twice, axis=1), signs, kinds.PROD)
        cos, sin = (
            self.shuffle(t, shape=(-1, 1, 2 * half)) for t in (self.gather(cos, twice, axis=1), sin)
        )
        other = self.gather(x, swapped, axis=2)
        return self.add(
            self.elementwise(x, cos, kinds.PROD), self.elementwise(other, sin, kinds.PROD)
        )
