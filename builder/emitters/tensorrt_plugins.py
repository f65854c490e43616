"""PluginAttention: attention, the arena's writes and exits as plugins of `mfs_trt.plugins`.

For full TensorRT. Their kernels are compiled for one GPU and lie in the plan as PTX.
"""

from dataclasses import dataclass
from typing import Any

from mfs_trt.builder.emitters.tensorrt_layers import Tensor, TensorRtLayers
from mfs_trt.engine.interface import EngineLimits, KVCacheSpec
from mfs_trt.model_config import ModelConfig
from mfs_trt.plugins import trt_layers


@dataclass(frozen=True)
class Launch:
    """What attention's kernel is compiled for; a plan has one."""

    compute_capability: int  # 80, 86, …
    tile_rows: int
    num_splits: int  # over keys


def choose_launch(
    limits: EngineLimits, num_kv_heads: int, compute_capability: int, num_processors: int
) -> Launch:
    """For decode steps of half the requests at half the context, as the profile is fastest at."""
    from mfs_trt.plugins.triton_kernels.paged_attention import DECODE_TILE_ROWS, choose_num_splits

    num_reqs = max(1, min(limits.max_num_seqs, limits.max_num_batched_tokens) // 2)
    num_splits = choose_num_splits(
        num_reqs * num_kv_heads, limits.max_model_len // 2, num_processors
    )
    return Launch(compute_capability, DECODE_TILE_ROWS, num_splits)


class PluginAttention:
    """Rows stay packed, as in `SegmentInput`.

    Inputs of its own are those of `engine.tensorrt_inputs.PluginInputs` and the arena's
    `key_cache.{group}.{index}`, `value_cache.{group}.{index}`, whose new content is the output
    `new_key_cache…` at the same address. Each layer has a pair of its own, so that nothing but its
    write reads the input: TensorRT then has no reason to copy the arena before it.
    """

    def __init__(
        self,
        layers: TensorRtLayers,
        model: ModelConfig,
        kv_spec: KVCacheSpec,
        num_groups: int,
        launch: Launch,
    ) -> None:
        """`num_groups`: layer groups of the segment, in block tables and slots."""
        self._layers, self._model, self._kv_spec = layers, model, kv_spec
        self._num_groups, self._launch = num_groups, launch

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
        layers, model, launch = self._layers, self._model, self._launch
        keys, values = (self._heads(rows, model.num_kv_heads) for rows in (key, value))
        caches = self._written(keys, values, group, index_in_group)
        attended = trt_layers.add_paged_attention(
            layers.network,
            self._heads(query, model.num_heads),
            *caches,
            layers.input("block_tables", "int32", (-1, -1, self._num_groups)),
            layers.input("query_start_loc", "int32", (-1,)),
            layers.input("seq_lens", "int32", (-1,)),
            dtype=layers.dtype_name,
            group=group,
            scale=model.head_dim**-0.5,
            window=window,
            tile_rows=launch.tile_rows,
            num_splits=launch.num_splits,
            compute_capability=launch.compute_capability,
        )
        return layers.shuffle(attended, shape=(-1, model.num_heads * model.head_dim))

    def tier_exit(self, rows: Tensor, tiers: Tensor, gains: Tensor, eps: float) -> Tensor:
        return trt_layers.add_tier_exit(
            self._layers.network,
            rows,
            self._layers.input("exit_rows", "int32", (-1,)),
            tiers,
            gains,
            eps=eps,
            compute_capability=self._launch.compute_capability,
        )

    def configure(self, settings: Any) -> None:
        """In-place writes are a preview feature."""
        settings.set_preview_feature(self._layers.trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)

    def _written(
        self, keys: Tensor, values: Tensor, group: int, index_in_group: int
    ) -> tuple[Tensor, Tensor]:
        """The layer's caches after keys and values [num_rows, kv_heads, d] were stored."""
        layers, spec = self._layers, self._kv_spec
        shape = (spec.num_frames, spec.num_kv_heads, spec.block_size, spec.head_dim)
        names = [f"{kind}.{group}.{index_in_group}" for kind in ("key_cache", "value_cache")]
        written = trt_layers.add_kv_write(
            layers.network,
            keys,
            values,
            layers.input("slot_mapping", "int32", (-1, self._num_groups)),
            *(layers.input(name, "activation", shape) for name in names),
            group=group,
            compute_capability=self._launch.compute_capability,
        )
        for name, cache in zip(names, written, strict=True):
            layers.output(f"new_{name}", cache)
        return written

    def _heads(self, rows: Tensor, num_heads: int) -> Tensor:
        """[num_rows, num_heads * d] → [num_rows, num_heads, d]."""
        return self._layers.shuffle(rows, shape=(-1, num_heads, self._model.head_dim))
