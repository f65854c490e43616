"""PortableAttention: native layers, which TensorRT and TensorRT-RTX have; no plugin is needed."""

from typing import Any

import torch

from mfs_trt.builder.emitters.tensorrt_layers import Tensor, TensorRtLayers
from mfs_trt.dtypes import torch_dtype
from mfs_trt.engine.interface import KVCacheSpec
from mfs_trt.model_config import ModelConfig


class PortableAttention:
    """Rows are written frame by frame, and attend padded, over each lane's gathered blocks.

    Inputs of its own are those of `engine.tensorrt_inputs.PortableInputs` and the arena's
    `key_cache.{group}.{index}`, `value_cache.{group}.{index}`, whose new content is the output
    `new_key_cache…` at the same address.
    """

    def __init__(self, layers: TensorRtLayers, model: ModelConfig, kv_spec: KVCacheSpec) -> None:
        """`kv_spec.num_frames` counts the scratch frames as well."""
        self._layers, self._model, self._kv_spec = layers, model, kv_spec
        self._masks: dict[int | None, Tensor] = {}  # by window
        self._existing: Tensor = None  # what `_existing_keys` gave

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
        layers, trt, model = self._layers, self._layers.trt, self._model
        where = f"{group}.{index_in_group}"
        keys, values = (
            self._written_context(f"{kind}.{where}", rows, group)
            for kind, rows in (("key_cache", key), ("value_cache", value))
        )
        scale = layers.scalar(model.head_dim**-0.5, torch_dtype(layers.dtype_name), 2)
        scaled = layers.elementwise(query, scale, trt.ElementWiseOperation.PROD)
        heads = layers.shuffle(scaled, shape=(-1, model.num_heads, model.head_dim))
        lanes = layers.gather(heads, layers.input("lane_rows", "int32", (-1, -1)))
        mask = self._mask(window)
        attention = layers.network.add_attention_v2(
            layers.shuffle(lanes, before=(0, 2, 1, 3)),
            keys,
            values,
            trt.AttentionNormalizationOp.SOFTMAX,
            trt.CausalMaskKind.NONE,
        )
        attention.mask = mask
        attention.decomposable = True
        width = model.num_heads * model.head_dim
        padded = layers.shuffle(attention.get_output(0), before=(0, 2, 1, 3), shape=(-1, width))
        return layers.gather(padded, layers.input("row_queries", "int32", (-1,)))

    def tier_exit(self, rows: Tensor, tiers: Tensor, gains: Tensor, eps: float) -> Tensor:
        return self._layers.gathered_exit(rows, tiers, gains, eps)

    def configure(self, settings: Any) -> None:
        pass

    def _written_context(self, cache_name: str, rows: Tensor, group: int) -> Tensor:
        """Store rows [num_rows, kv_heads * d]; every lane's context [lanes, kv_heads, keys, d].

        What a frame still holds of others' tokens is taken as zero: a mask leaves nan as it is.
        """
        layers, trt, spec = self._layers, self._layers.trt, self._kv_spec
        shape = (spec.num_frames, spec.num_kv_heads, spec.block_size, spec.head_dim)
        order = layers.input(f"rows_by_frame.{group}", "int32", (-1,))
        heads = layers.shuffle(rows, shape=(-1, spec.num_kv_heads, spec.head_dim))
        update = layers.network.add_kv_cache_update(
            layers.input(cache_name, "activation", shape),
            layers.gather(heads, order),
            layers.input(f"frame_offsets.{group}", "int32", (spec.num_frames,)),
            trt.KVCacheMode.LINEAR,
        )
        update.update_form = trt.AttentionIOForm.PACKED_NHD
        update.update_lengths = layers.input(
            f"frame_row_starts.{group}", "int32", (spec.num_frames + 1,)
        )
        written = update.get_output(0)
        layers.output(f"new_{cache_name}", written)
        tables = layers.input(f"block_tables.{group}", "int32", (-1, -1))
        blocks = layers.gather(written, tables)
        context = layers.shuffle(blocks, before=(0, 2, 1, 3, 4), shape=(0, 0, -1, spec.head_dim))
        zero = layers.scalar(0, torch_dtype(layers.dtype_name), 4)
        return layers.network.add_select(self._existing_keys(), context, zero).get_output(0)

    def _existing_keys(self) -> Tensor:
        """[lanes, 1, keys, 1] bool: keys that the lane's request has."""
        if self._existing is None:
            layers = self._layers
            keys = layers.shuffle(self._key_positions(), shape=(1, 1, -1, 1))
            ends = layers.shuffle(layers.input("lane_lengths", "int32", (-1,)), shape=(-1, 1, 1, 1))
            self._existing = layers.elementwise(keys, ends, layers.trt.ElementWiseOperation.LESS)
        return self._existing

    def _key_positions(self) -> Tensor:
        return self._layers.input("key_positions", "int32", (-1,))

    def _mask(self, window: int | None) -> Tensor:
        """[lanes, 1, width, keys] bool: keys at most at the query's position, inside its window."""
        if window not in self._masks:
            layers, kinds = self._layers, self._layers.trt.ElementWiseOperation
            positions = layers.input("lane_positions", "int32", (-1, -1))
            queries = layers.shuffle(positions, shape=(0, 1, -1, 1))
            keys = layers.shuffle(self._key_positions(), shape=(1, 1, 1, -1))
            later = layers.elementwise(keys, queries, kinds.GREATER)
            mask = layers.network.add_unary(later, layers.trt.UnaryOperation.NOT).get_output(0)
            if window is not None:
                width = layers.scalar(window, torch.int32, 4)
                begin = layers.elementwise(queries, width, kinds.SUB)
                inside = layers.elementwise(keys, begin, kinds.GREATER)
                mask = layers.elementwise(mask, inside, kinds.AND)
            self._masks[window] = mask
        return self._masks[window]
