"""TorchEngine: the nested model run by torch over the frame arena, on one device.

What engines in torch share. How rows write and read the arena is their own (`_attend`), and may
leave a tier otherwise than by the model's own exit (`_exit_logits`).
"""

from abc import ABC, abstractmethod

import numpy as np
import torch
from torch import Tensor

from mfs_trt.engine.interface import EngineLimits, KVCacheSpec, SegmentInput, StepInput, StepOutput
from mfs_trt.errors import EngineError
from mfs_trt.model.blocks import Attend
from mfs_trt.model.transformer import NestedModel


class TorchEngine(ABC):
    """Runs segments from shallow to deep; every layer's keys and values live in the arena.

    `key_cache[i]`, `value_cache[i]`: [num_frames, kv_heads, block_size, head_dim] for the i-th
    layer of a layer group; `features[s]`: [num_feature_slots, hidden] for the boundary above
    segment s. All of it on the model's device and in its dtype.
    """

    def __init__(self, model: NestedModel, limits: EngineLimits, kv_spec: KVCacheSpec) -> None:
        self.model, self.family = model, model.family
        self.limits, self.kv_spec = limits, kv_spec
        self.dtype = model.embed_tokens.weight.dtype
        self.device = model.embed_tokens.weight.device
        place = {"dtype": self.dtype, "device": self.device}
        shape = (
            kv_spec.num_frames,
            kv_spec.num_kv_heads,
            kv_spec.block_size,
            kv_spec.head_dim,
        )
        try:
            self.key_cache, self.value_cache = (
                [torch.zeros(shape, **place) for _ in range(kv_spec.group_size)] for _ in range(2)
            )
        except RuntimeError as error:
            raise EngineError(
                f"memory: expected room for a KV arena of {kv_spec.nbytes} bytes: {error}"
            ) from None
        size = (kv_spec.num_feature_slots, self.family.model.hidden_size)
        self.features = [torch.zeros(size, **place) for _ in self.family.tiers[:-1]]

    @torch.inference_mode()
    def execute(self, step: StepInput) -> StepOutput:
        x = self.model.embed(self._index(step.input_ids))
        logits: list[np.ndarray | None] = []
        for s, rows in enumerate(step.segments):
            if rows is None:
                logits.append(None)
                continue
            x = self._run_segment(s, rows, self._source(s, rows.source_rows, x))
            self._save_features(s, rows.save_features, x)
            logits.append(self._exit(s, rows.exit_rows, x))
        return StepOutput.from_logits(logits)

    def close(self) -> None:
        self.key_cache, self.value_cache, self.features = [], [], []

    def _run_segment(self, segment: int, rows: SegmentInput, x: Tensor) -> Tensor:
        """[num_rows, hidden] → the same, valid until the segment's next run."""
        positions = self._index(rows.positions)
        return self.model.run_segment(segment, x, positions, self._attend(segment, rows))

    @abstractmethod
    def _attend(self, segment: int, rows: SegmentInput) -> Attend:
        """How the segment's rows write their keys and values and see their requests' blocks."""

    def _exit_logits(self, segment: int, exit_rows: np.ndarray, x: Tensor) -> Tensor:
        """[num_exits, vocab_size] of rows of x [num_rows, hidden]."""
        return self.model.exit_logits(segment, x[self._index(exit_rows)])

    def _index(self, array: np.ndarray) -> Tensor:
        """int64 on the device, as torch indexes with."""
        return torch.from_numpy(array).to(self.device, torch.int64)

    def _source(self, segment: int, source_rows: np.ndarray, below: Tensor) -> Tensor:
        """Rows of the segment below, or kept features where the index is negative."""
        kept = source_rows < 0
        if segment == 0 or not kept.any():
            return below[self._index(source_rows)]
        x = below.new_empty((len(source_rows), self.family.model.hidden_size))
        x[self._index(np.flatnonzero(~kept))] = below[self._index(source_rows[~kept])]
        features = self.features[segment - 1]
        x[self._index(np.flatnonzero(kept))] = features[self._index(-1 - source_rows[kept])]
        return x

    def _save_features(self, segment: int, slots: np.ndarray, x: Tensor) -> None:
        saved = np.flatnonzero(slots >= 0)
        if len(saved):
            self.features[segment][self._index(slots[saved])] = x[self._index(saved)]

    def _exit(self, segment: int, exit_rows: np.ndarray, x: Tensor) -> np.ndarray | None:
        if len(exit_rows) == 0:
            return None
        logits = self._exit_logits(segment, exit_rows, x)
        return (logits if self.dtype is torch.float64 else logits.float()).cpu().numpy()
