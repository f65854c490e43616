"""TensorRtEngine: the nested model's plans on one GPU, all bound to one KV arena.

One plan a segment, one a distinct LM head. Hidden states, arena and features stay on the GPU; a
step sends each segment's arrays in one copy and brings back logits.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from mfs_trt.dtypes import item_size, torch_dtype
from mfs_trt.engine.cuda_graphs import RecordRun, make_recorder, uses_graphs
from mfs_trt.engine.decode_buckets import DecodeBuckets
from mfs_trt.engine.interface import EngineLimits, KVCacheSpec, SegmentInput, StepInput, StepOutput
from mfs_trt.engine.manifest import EngineManifest
from mfs_trt.engine.packed_arrays import upload
from mfs_trt.engine.tensorrt_arena import arena_tensors, new_arena
from mfs_trt.engine.tensorrt_decode import DecodeRuns
from mfs_trt.engine.tensorrt_inputs import make_inputs
from mfs_trt.engine.tensorrt_plans import DECODE, PREFILL, Plans, load_plans
from mfs_trt.errors import EngineError
from mfs_trt.family.spec import FamilySpec
from mfs_trt.tensor_names import EMBEDDING
from mfs_trt.weights.store import WeightStore

_ALIGNMENT = 64  # int32 numbers: 256 bytes, as of CUDA's own allocations


@dataclass(frozen=True)
class _ExitRows:
    """Rows that leave at one tier."""

    tier: int
    hidden: torch.Tensor  # [num_rows, hidden], of the segment
    rows: np.ndarray  # [num_exits] int32: those of `hidden` that leave


class TensorRtEngine:
    """Runs segments from shallow to deep, then each LM head once for all its tiers' exit rows.

    `arena[i]`: keys and values of the i-th layer of a layer group, scratch frames behind the
    others; `features[s]`: [num_feature_slots, hidden] for the boundary above segment s.
    """

    def __init__(
        self,
        family: FamilySpec,
        plans: Plans,
        embedding: torch.Tensor,
        gains: torch.Tensor,
        limits: EngineLimits,
        kv_spec: KVCacheSpec,
        attention: str,
        record_run: RecordRun | None = None,
    ) -> None:
        """`embedding` [vocab_size, hidden] and `gains` [num_tiers, hidden], of the exits' norms,
        are on the device and in the dtype that everything is computed in. `attention`: the plans'.
        `record_run` records decode-shaped runs for replay; without one every step runs as it comes.
        """
        self.family, self.limits, self.kv_spec = family, limits, kv_spec
        self._plans, self._inputs = plans, make_inputs(attention, limits, kv_spec)
        num_frames = kv_spec.num_frames + self._inputs.num_scratch_frames
        shape = (num_frames, kv_spec.num_kv_heads, kv_spec.block_size, kv_spec.head_dim)
        try:
            self.arena = new_arena(attention, embedding, shape, kv_spec.group_size)
        except torch.OutOfMemoryError as error:
            raise EngineError(
                f"memory: expected room for a KV arena of {kv_spec.nbytes} bytes: "
                f"{str(error).splitlines()[0]}"
            ) from None
        for plan, num_groups in zip(plans.segments, kv_spec.groups_per_segment, strict=True):
            plan.bind(arena_tensors(attention, self.arena, num_groups))
        plans.segments[0].bind({EMBEDDING: embedding})
        for plan in plans.heads.values():
            plan.bind({"gains": gains})
        hidden_size = family.model.hidden_size
        self._no_rows = embedding.new_zeros((1, hidden_size))
        self.features = [
            embedding.new_zeros((max(1, kv_spec.num_feature_slots), hidden_size))
            for _ in family.tiers[:-1]
        ]
        self._decode: DecodeRuns | None = None
        if record_run is not None and self._inputs.is_recordable:
            buckets = DecodeBuckets(limits, kv_spec.block_size)
            place = embedding.new_zeros((buckets.max_rows, hidden_size))
            self._decode = DecodeRuns(plans, buckets, self._segment_arrays, place, record_run)
        self._device, self._stream = embedding.device, None
        if self._device.type == "cuda":
            self._stream = torch.cuda.Stream()
            torch.cuda.synchronize()  # everything above is there before that stream reads it

    @classmethod
    def load(cls, folder: Path, manifest: EngineManifest) -> "TensorRtEngine":
        """Load the plans of an engine folder; checks family, versions, GPU and files."""
        family = manifest.load_family()
        plans = load_plans(folder, manifest, family)
        store, dtype = WeightStore(manifest.family), torch_dtype(manifest.dtype)
        norms = [store.get(family.norm_name(tier)) for tier in range(len(family.tiers))]
        layer_nbytes = manifest.layer_nbytes(family, item_size(manifest.dtype))
        return cls(
            family,
            plans,
            store.get(EMBEDDING).to("cuda", dtype),
            torch.stack(norms).to("cuda", dtype),
            manifest.limits,
            manifest.kv_spec(family, layer_nbytes),
            manifest.attention,
            make_recorder() if uses_graphs() else None,
        )

    @torch.inference_mode()
    def execute(self, step: StepInput) -> StepOutput:
        with self._on_stream():
            hidden: torch.Tensor | None = None
            exits: list[_ExitRows] = []
            for s, rows in enumerate(step.segments):
                if rows is None:
                    continue
                hidden = self._run_segment(s, rows, step.input_ids, hidden)
                self._save_features(s, rows.save_features, hidden)
                if len(rows.exit_rows):
                    exits.append(_ExitRows(s, hidden, rows.exit_rows))
            return self._run_heads(exits)

    def close(self) -> None:
        self._decode = None  # recorded runs hold what plans have made
        self._plans.close()
        self._plans, self.arena, self.features = Plans((), {}), [], []

    def _segment_arrays(
        self,
        segment: int,
        rows: SegmentInput,
        input_ids: np.ndarray,
        num_blocks: int | None = None,
    ) -> dict[str, np.ndarray]:
        arrays = {**self._inputs.segment(rows, num_blocks), "positions": rows.positions}
        if segment == 0:
            arrays["input_ids"] = input_ids
        else:
            arrays["source_rows"] = rows.source_rows
        return arrays

    def _run_segment(
        self,
        segment: int,
        rows: SegmentInput,
        input_ids: np.ndarray,
        below: torch.Tensor | None,
    ) -> torch.Tensor:
        """[num_rows, hidden], valid until the segment's next run."""
        features = self.features[segment - 1] if segment > 0 else None
        if self._decode is not None:
            hidden = self._decode.run_segment(segment, rows, input_ids, below, features)
            if hidden is not None:
                return hidden
        arrays = self._segment_arrays(segment, rows, input_ids)
        on_host = {n: arrays.pop(n) for n in [*arrays] if n.startswith("host_")}
        tensors = upload(arrays, self._device)
        tensors |= {name: torch.from_numpy(array) for name, array in on_host.items()}
        if features is not None:
            tensors["features"] = features
            tensors["below"] = self._no_rows if below is None else below
        profile = DECODE if rows.num_rows == rows.num_reqs else PREFILL
        return self._plans.segments[segment].run(tensors, profile)

    def _save_features(self, segment: int, slots: np.ndarray, hidden: torch.Tensor) -> None:
        saved = np.flatnonzero(slots >= 0).astype(np.int32)
        if len(saved):
            tensors = upload({"rows": saved, "slots": slots[saved]}, self._device)
            self.features[segment][tensors["slots"]] = hidden[tensors["rows"]]

    def _run_heads(self, exits: Sequence[_ExitRows]) -> StepOutput:
        num_tiers = len(self.family.tiers)
        logits: list[np.ndarray | None] = [None] * num_tiers
        token_ids, top_logits = list(logits), list(logits)
        for name in self._plans.heads:
            mine = [e for e in exits if self.family.head_name(e.tier) == name]
            if not mine:
                continue
            counts = [len(e.rows) for e in mine]
            tiers = np.repeat(np.array([e.tier for e in mine], np.int32), counts)
            begins = np.cumsum([0, *(len(e.hidden) for e in mine[:-1])], dtype=np.int32)
            exit_rows = np.concatenate([e.rows + b for e, b in zip(mine, begins, strict=True)])
            hidden = torch.cat([e.hidden for e in mine]) if mine[1:] else mine[0].hidden
            rows = self._run_head(name, hidden, exit_rows, tiers).float()
            ids = rows.argmax(dim=1, keepdim=True)
            top = rows.gather(1, ids)
            begin = 0
            for e, count in zip(mine, counts, strict=True):
                part = slice(begin, begin + count)
                logits[e.tier] = rows[part].cpu().numpy()
                token_ids[e.tier] = ids[part, 0].cpu().numpy()
                top_logits[e.tier] = top[part, 0].cpu().numpy()
                begin += count
        return StepOutput(tuple(logits), tuple(token_ids), tuple(top_logits))

    def _run_head(
        self, name: str, rows: torch.Tensor, exit_rows: np.ndarray, tiers: np.ndarray
    ) -> torch.Tensor:
        """[num_exits, vocab_size] of rows [n, hidden], valid until the head's next run."""
        if self._decode is not None:
            logits = self._decode.run_head(name, rows, exit_rows, tiers)
            if logits is not None:
                return logits
        tensors = {**upload({"exit_rows": exit_rows, "tiers": tiers}, self._device), "rows": rows}
        max_decode_rows = min(self.limits.max_num_seqs, self.limits.max_num_batched_tokens)
        profile = DECODE if len(tiers) <= max_decode_rows else PREFILL
        return self._plans.heads[name].run(tensors, profile)

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
