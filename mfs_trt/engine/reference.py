"""ReferenceEngine: the nested model in plain torch over the frame arena; the oracle."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mfs_trt.engine.interface import EngineLimits, KVCacheSpec, SegmentInput, StepInput, StepOutput
from mfs_trt.engine.manifest import EngineManifest
from mfs_trt.engine.threads import choose_num_threads
from mfs_trt.errors import EngineError
from mfs_trt.model.blocks import Attend
from mfs_trt.model.transformer import NestedModel
from mfs_trt.plugins import reference as ops
from mfs_trt.weights.store import WeightStore

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


class ReferenceEngine:
    """Runs segments from shallow to deep; every layer's keys and values live in the arena.

    `key_cache[i]`, `value_cache[i]`: [num_frames, kv_heads, block_size, head_dim] for the i-th
    layer of a layer group; `features[s]`: [num_feature_slots, hidden] for the boundary above
    segment s.
    """

    def __init__(self, model: NestedModel, limits: EngineLimits, kv_spec: KVCacheSpec) -> None:
        self.model, self.family = model, model.family
        self.limits, self.kv_spec = limits, kv_spec
        self.dtype = model.embed_tokens.weight.dtype
        shape = (
            kv_spec.num_frames,
            kv_spec.num_kv_heads,
            kv_spec.block_size,
            kv_spec.head_dim,
        )
        try:
            self.key_cache, self.value_cache = (
                [torch.zeros(shape, dtype=self.dtype) for _ in range(kv_spec.group_size)]
                for _ in range(2)
            )
        except RuntimeError as error:
            raise EngineError(
                f"memory: expected room for a KV arena of {kv_spec.nbytes} bytes: {error}"
            ) from None
        size = (kv_spec.num_feature_slots, self.family.model.hidden_size)
        self.features = [torch.zeros(size, dtype=self.dtype) for _ in self.family.tiers[:-1]]

    @classmethod
    def load(cls, manifest: EngineManifest) -> "ReferenceEngine":
        """Build the model from the family that `manifest` names; checks its revision."""
        torch.set_num_threads(choose_num_threads())
        family = manifest.load_family()
        dtype = DTYPES.get(manifest.dtype)
        if dtype is None:
            raise EngineError(f"dtype: expected {', '.join(DTYPES)}, got {manifest.dtype!r}")
        store = WeightStore(manifest.family)
        kv_spec = manifest.kv_spec(family, manifest.layer_nbytes(family, dtype.itemsize))
        model = NestedModel.from_store(store, manifest.limits.max_model_len, dtype)
        return cls(model, manifest.limits, kv_spec)

    @torch.inference_mode()
    def execute(self, step: StepInput) -> StepOutput:
        x = self.model.embed(torch.from_numpy(step.input_ids).long())
        logits: list[np.ndarray | None] = []
        for s, rows in enumerate(step.segments):
            if rows is None:
                logits.append(None)
                continue
            x = self._source(s, rows.source_rows, x)
            positions = torch.from_numpy(rows.positions).long()
            x = self.model.run_segment(s, x, positions, self._attend(s, rows))
            self._save_features(s, rows.save_features, x)
            logits.append(self._exit(s, rows.exit_rows, x))
        return StepOutput.from_logits(logits)

    def close(self) -> None:
        self.key_cache, self.value_cache, self.features = [], [], []

    def _source(self, segment: int, source_rows: np.ndarray, below: Tensor) -> Tensor:
        """Rows of the segment below, or kept features where the index is negative."""
        index = torch.from_numpy(source_rows).long()
        if segment == 0:
            return below[index]
        kept = index < 0
        if not bool(kept.any()):
            return below[index]
        x = below.new_empty((len(index), self.family.model.hidden_size))
        x[~kept] = below[index[~kept]]
        x[kept] = self.features[segment - 1][-1 - index[kept]]
        return x

    def _save_features(self, segment: int, slots: np.ndarray, x: Tensor) -> None:
        if (slots >= 0).any():
            index = torch.from_numpy(slots).long()
            self.features[segment][index[index >= 0]] = x[index >= 0]

    def _exit(self, segment: int, exit_rows: np.ndarray, x: Tensor) -> np.ndarray | None:
        if len(exit_rows) == 0:
            return None
        logits = self.model.exit_logits(segment, x[torch.from_numpy(exit_rows).long()])
        return (logits if self.dtype is torch.float64 else logits.float()).numpy()

    def _attend(self, segment: int, rows: SegmentInput) -> Attend:
        """Write the rows' keys and values, then attend over the request's blocks."""
        spec = self.family.segments[segment]
        config = self.family.model
        slots = torch.from_numpy(rows.slot_mapping).long()
        tables = torch.from_numpy(rows.block_tables).long()
        starts: Sequence[int] = rows.query_start_loc.tolist()
        seq_lens: Sequence[int] = rows.seq_lens.tolist()

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            group, i = divmod(layer - spec.first_layer, self.kv_spec.group_size)
            ops.kv_write(self.key_cache[i], key, slots[:, group])
            ops.kv_write(self.value_cache[i], value, slots[:, group])
            return ops.paged_attention(
                query,
                self.key_cache[i],
                self.value_cache[i],
                tables[:, :, group],
                starts,
                seq_lens,
                config.head_dim**-0.5,
                config.layer_window(layer),
            )

        return attend
