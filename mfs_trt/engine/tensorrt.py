"""TensorRtEngine: the nested model's plans on one GPU, all bound to one KV arena.

One plan a segment, one a distinct LM head. Hidden states, arena and features stay on the GPU; a
step sends each segment's arrays in one copy and brings back logits.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from mfs_trt.dtypes import item_size, torch_dtype
from mfs_trt.engine.interface import EngineLimits, KVCacheSpec, SegmentInput, StepInput, StepOutput
from mfs_trt.engine.manifest import EngineManifest
from mfs_trt.engine.tensorrt_inputs import attention_inputs, num_scratch_frames
from mfs_trt.engine.tensorrt_plans import DECODE, PREFILL, Plans, load_plans
from mfs_trt.errors import EngineError
from mfs_trt.family.spec import FamilySpec
from mfs_trt.tensor_names import EMBEDDING
from mfs_trt.weights.store import WeightStore

_ALIGNMENT = 64  # int32 numbers: 256 bytes, as of CUDA's own allocations


@dataclass(frozen=True)
class _ExitRows:
    """Hidden rows that leave at one tier."""

    tier: int
    hidden: torch.Tensor  # [num_exits, hidden]


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
    ) -> None:
        """`embedding` [vocab_size, hidden] and `gains` [num_tiers, hidden], of the exits' norms,
        are on the device and in the dtype that everything is computed in.
        """
        self.family, self.limits, self.kv_spec = family, limits, kv_spec
        self._plans, self._num_scratch = plans, num_scratch_frames(limits, kv_spec.block_size)
        self._num_frames = kv_spec.num_frames + self._num_scratch
        shape = (self._num_frames, kv_spec.num_kv_heads, kv_spec.block_size, kv_spec.head_dim)
        try:
            self.arena = [
                [embedding.new_zeros(shape) for _ in ("key_cache", "value_cache")]
                for _ in range(kv_spec.group_size)
            ]
        except torch.OutOfMemoryError as error:
            raise EngineError(
                f"memory: expected room for a KV arena of {kv_spec.nbytes} bytes: "
                f"{str(error).splitlines()[0]}"
            ) from None
        for s, plan in enumerate(plans.segments):
            plan.bind(self._arena_tensors(s))
        plans.segments[0].bind({EMBEDDING: embedding})
        for plan in plans.heads.values():
            plan.bind({"gains": gains})
        hidden_size = family.model.hidden_size
        self._no_rows = embedding.new_zeros((1, hidden_size))
        self.features = [
            embedding.new_zeros((max(1, kv_spec.num_feature_slots), hidden_size))
            for _ in family.tiers[:-1]
        ]
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
        )

    @torch.inference_mode()
    def execute(self, step: StepInput) -> StepOutput:
        with self._on_stream():
            hidden: torch.Tensor | None = None
            exits: list[_ExitRows] = []
            for s, rows in enumerate(step.segments):
                if rows is None:
                    continue
                arrays = self._segment_arrays(s, rows, step.input_ids)
                saved = np.flatnonzero(rows.save_features >= 0).astype(np.int32)
                own = {
                    "exit_rows": rows.exit_rows,
                    "saved_rows": saved,
                    "slots": rows.save_features[saved],
                }
                tensors = upload({**arrays, **own}, self._device)
                exit_rows, saved_rows, slots = (tensors.pop(name) for name in own)
                hidden = self._run_segment(s, tensors, hidden)
                if len(saved):
                    self.features[s][slots] = hidden[saved_rows]
                if len(rows.exit_rows):
                    exits.append(_ExitRows(s, hidden[exit_rows]))
            return self._run_heads(exits)

    def close(self) -> None:
        self._plans.close()
        self._plans, self.arena, self.features = Plans((), {}), [], []

    def _arena_tensors(self, segment: int) -> dict[str, torch.Tensor]:
        """Inputs and outputs of a segment's layers, the output at the input's own address."""
        tensors = {}
        for group in range(self.kv_spec.groups_per_segment[segment]):
            for i, pair in enumerate(self.arena):
                for kind, tensor in zip(("key_cache", "value_cache"), pair, strict=True):
                    tensors[f"{kind}.{group}.{i}"] = tensor
                    tensors[f"new_{kind}.{group}.{i}"] = tensor
        return tensors

    def _segment_arrays(
        self, segment: int, rows: SegmentInput, input_ids: np.ndarray
    ) -> dict[str, np.ndarray]:
        arrays = attention_inputs(
            rows, self._num_frames, self._num_scratch, self.kv_spec.block_size
        )
        arrays["positions"] = rows.positions
        if segment == 0:
            arrays["input_ids"] = input_ids
        else:
            arrays["source_rows"] = rows.source_rows
        return arrays

    def _run_segment(
        self, segment: int, tensors: dict[str, torch.Tensor], below: torch.Tensor | None
    ) -> torch.Tensor:
        if segment > 0:
            tensors["features"] = self.features[segment - 1]
            tensors["below"] = self._no_rows if below is None else below
        is_decode = tensors["lane_rows"].shape[1] == 1
        return self._plans.segments[segment].run(tensors, DECODE if is_decode else PREFILL)

    def _run_heads(self, exits: Sequence[_ExitRows]) -> StepOutput:
        num_tiers = len(self.family.tiers)
        logits: list[np.ndarray | None] = [None] * num_tiers
        token_ids, top_logits = list(logits), list(logits)
        for name, head in self._plans.heads.items():
            mine = [e for e in exits if self.family.head_name(e.tier) == name]
            if not mine:
                continue
            counts = [len(e.hidden) for e in mine]
            tiers = np.repeat(np.array([e.tier for e in mine], np.int32), counts)
            tensors = {"rows": torch.cat([e.hidden for e in mine])}
            tensors |= upload({"tiers": tiers}, self._device)
            is_decode = len(tiers) <= min(
                self.limits.max_num_seqs, self.limits.max_num_batched_tokens
            )
            rows = head.run(tensors, DECODE if is_decode else PREFILL).float()
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

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


def upload(arrays: Mapping[str, np.ndarray], device: torch.device) -> dict[str, torch.Tensor]:
    """int32 arrays to the device in one copy: views of one buffer, by name."""
    begins, size = {}, 0
    for name, array in arrays.items():
        begins[name] = size
        size += -(-array.size // _ALIGNMENT) * _ALIGNMENT
    packed = np.zeros(size, np.int32)
    for name, array in arrays.items():
        packed[begins[name] : begins[name] + array.size] = array.ravel()
    buffer = torch.from_numpy(packed).to(device)
    return {
        name: buffer[begins[name] : begins[name] + array.size].view(array.shape)
        for name, array in arrays.items()
    }
