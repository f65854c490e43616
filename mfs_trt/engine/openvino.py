"""OpenVinoEngine: the nested model's plans compiled for this CPU, all bound to one KV arena.

One plan a segment, one a distinct LM head. A plan takes numpy arrays without copying them; the
arena is bound by address once and never moves.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import openvino as ov

from mfs_trt.engine.interface import EngineLimits, KVCacheSpec, SegmentInput, StepInput, StepOutput
from mfs_trt.engine.manifest import EngineManifest
from mfs_trt.engine.mapped_pages import release_pages
from mfs_trt.engine.openvino_inputs import BoundInputs, as_tensor
from mfs_trt.engine.openvino_plans import CompiledPlans, compile_plans
from mfs_trt.errors import EngineError
from mfs_trt.family.spec import FamilySpec
from mfs_trt.tensor_names import EMBEDDING
from mfs_trt.weights.mapped import map_tensor, to_float32


@dataclass(frozen=True)
class _ExitRows:
    """Hidden rows that leave at one tier."""

    tier: int
    hidden: np.ndarray  # [num_exits, hidden]


class _Plan:
    """A compiled plan with inputs that stay bound and one output."""

    def __init__(self, compiled: ov.CompiledModel, output: str) -> None:
        self.request = compiled.create_infer_request()
        self.inputs = BoundInputs(self.request)
        self._output = output

    def run(self, arrays: Mapping[str, np.ndarray]) -> ov.Tensor:
        """The output's own memory, valid until the next run."""
        self.inputs.write(arrays)
        self.request.infer(share_outputs=True)  # else every output is copied
        return self.request.get_tensor(self._output)


class OpenVinoEngine:
    """Runs segments from shallow to deep, then each LM head once for all its tiers' exit rows.

    `arena[i]`: keys and values of the i-th layer of a layer group, scratch frames behind the
    others; `features[s]`: [num_feature_slots, hidden] for the boundary above segment s.
    """

    def __init__(
        self,
        family: FamilySpec,
        plans: CompiledPlans,
        embedding: np.ndarray,
        gains: np.ndarray,
        limits: EngineLimits,
        kv_spec: KVCacheSpec,
        weight_files: Sequence[Path] = (),
    ) -> None:
        """`embedding`: [vocab_size, hidden], mapped; `gains`: [num_tiers, hidden] float32, of the
        exits' norms. `weight_files`: mapped by the plans, which lay some weights out anew when they
        first run: the files' pages are given back then.
        """
        self._weight_files = weight_files
        self.family, self.limits, self.kv_spec = family, limits, kv_spec
        # Scratch frames lie behind the arena's; untouched, they take no physical memory.
        num_frames = kv_spec.num_frames + _num_scratch_frames(limits, kv_spec)
        try:
            self.arena = [
                [plans.new_cache(kind, num_frames) for kind in ("key_cache", "value_cache")]
                for _ in range(kv_spec.group_size)
            ]
        except MemoryError as error:
            raise EngineError(
                f"memory: expected room for a KV arena of {kv_spec.nbytes} bytes: {error}"
            ) from None
        hidden_size = family.model.hidden_size
        self.features = [
            np.zeros((max(1, kv_spec.num_feature_slots), hidden_size), np.float32)
            for _ in family.tiers[:-1]
        ]
        self._no_rows = as_tensor(np.zeros((1, hidden_size), np.float32))
        self._attention_inputs = _AttentionInputs(kv_spec.block_size)
        self._embedding = embedding
        self._gains = np.ascontiguousarray(gains, np.float32)
        self._segments = [self._segment(plan, s) for s, plan in enumerate(plans.segments)]
        self._heads = {name: self._head(plan) for name, plan in plans.heads.items()}

    @classmethod
    def load(cls, folder: Path, manifest: EngineManifest) -> "OpenVinoEngine":
        """Compile the plans of an engine folder; checks versions, files and the family."""
        family = manifest.load_family()
        plans = compile_plans(folder, manifest, family)
        family_dir = manifest.family
        embedding = map_tensor(family_dir, family, EMBEDDING)
        norms = [family.norm_name(tier) for tier in range(len(family.tiers))]
        gains = np.stack([to_float32(map_tensor(family_dir, family, name)) for name in norms])
        kv_spec = manifest.kv_spec(family, plans.layer_nbytes)
        files = [(folder / f"{plan.name}.bin").resolve() for plan in manifest.plans]
        return cls(family, plans, embedding, gains, manifest.limits, kv_spec, files)

    def execute(self, step: StepInput) -> StepOutput:
        hidden: ov.Tensor | None = None
        exits: list[_ExitRows] = []
        for s, rows in enumerate(step.segments):
            if rows is None:
                continue
            hidden = self._run_segment(s, rows, step.input_ids, hidden)
            if s < len(self.features):
                saved = rows.save_features >= 0
                if saved.any():
                    self.features[s][rows.save_features[saved]] = hidden.data[saved]
            if len(rows.exit_rows):
                exits.append(_ExitRows(s, hidden.data[rows.exit_rows]))
        output = self._run_heads(exits)
        if self._weight_files:
            for file in self._weight_files:
                release_pages(file)
            self._weight_files = ()
        return output

    def close(self) -> None:
        self._segments, self._heads, self.arena, self.features = [], {}, [], []

    def _segment(self, compiled: ov.CompiledModel, segment: int) -> "_Plan":
        plan = _Plan(compiled, "hidden")
        for group in range(self.kv_spec.groups_per_segment[segment]):
            for i, (key, value) in enumerate(self.arena):
                plan.inputs.bind(f"key_cache.{group}.{i}", key.bound)
                plan.inputs.bind(f"value_cache.{group}.{i}", value.bound)
        if segment == 0:
            plan.inputs.bind(EMBEDDING, as_tensor(self._embedding))
        return plan

    def _head(self, compiled: ov.CompiledModel) -> "_Plan":
        plan = _Plan(compiled, "logits")
        plan.inputs.bind("gains", as_tensor(self._gains))
        return plan

    def _run_segment(
        self, segment: int, rows: SegmentInput, input_ids: np.ndarray, below: ov.Tensor | None
    ) -> ov.Tensor:
        """Returns the plan's own output, valid until the segment runs again."""
        plan = self._segments[segment]
        tables = self._private_tables(rows)
        arrays = self._attention_inputs(rows, tables)
        arrays["positions"] = rows.positions
        if segment == 0:
            arrays["input_ids"] = input_ids
        else:
            arrays["source_rows"] = rows.source_rows
            plan.inputs.bind("features", as_tensor(self.features[segment - 1]))
            plan.inputs.bind("below", self._no_rows if below is None else below)
        return plan.run(arrays)

    def _private_tables(self, rows: SegmentInput) -> np.ndarray:
        """Block tables [num_reqs, max_blocks, m] through which the operator may write.

        It writes every row, and clears what follows the last one in its block. A block in which a
        request only has rows that exist already (slot -1) may be shared or go on after them: it is
        used as a copy in a scratch frame. A block in which the request stores rows as well is its
        own: the others are written there again, equal up to rounding.
        """
        is_stored = rows.slot_mapping[:, 0] >= 0
        if is_stored.all():
            return rows.block_tables
        request = np.repeat(np.arange(rows.num_reqs), np.diff(rows.query_start_loc))
        block = rows.positions // self.kv_spec.block_size
        is_copied = np.zeros(rows.block_tables.shape[:2], bool)
        is_copied[request, block] = True
        is_copied[request[is_stored], block[is_stored]] = False
        frames = rows.block_tables[is_copied]  # [num_copied, m]
        scratch = self.kv_spec.num_frames + np.arange(frames.size).reshape(frames.shape)
        for tensors in self.arena:
            for tensor in tensors:
                tensor.array[scratch] = tensor.array[frames]
        tables = rows.block_tables.copy()
        tables[is_copied] = scratch
        return tables

    def _run_heads(self, exits: Sequence[_ExitRows]) -> StepOutput:
        """The logits stay in the head's own memory, where numpy finds the most likely tokens: on
        32 rows that takes a seventh of the time of OpenVINO's TopK in the plan.
        """
        logits: list[np.ndarray | None] = [None] * len(self.family.tiers)
        for name, head in self._heads.items():
            mine = [e for e in exits if self.family.head_name(e.tier) == name]
            if not mine:
                continue
            tiers = np.repeat([e.tier for e in mine], [len(e.hidden) for e in mine])
            hidden = np.concatenate([e.hidden for e in mine])
            rows, begin = head.run({"rows": hidden, "tiers": tiers.astype(np.int32)}).data, 0
            for e in mine:
                logits[e.tier] = rows[begin : begin + len(e.hidden)]
                begin += len(e.hidden)
        return StepOutput.from_logits(logits)


def _num_scratch_frames(limits: EngineLimits, spec: KVCacheSpec) -> int:
    """Frames of the blocks that one step's rows of a segment can touch at most."""
    runs = limits.max_num_batched_tokens // spec.block_size + 2 * limits.max_num_seqs
    return min(runs, limits.max_num_batched_tokens) * max(spec.groups_per_segment)


class _AttentionInputs:
    """The paged-attention operator's view of a segment's requests.

    What does not depend on the blocks is mostly the same in all segments of a step: made once.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._seq_lens = self._query_start_loc = np.zeros(0, np.int32)
        self._arrays: dict[str, np.ndarray] = {}
        self._num_blocks = self._seq_lens

    def __call__(self, rows: SegmentInput, block_tables: np.ndarray) -> dict[str, np.ndarray]:
        is_same = np.array_equal(rows.seq_lens, self._seq_lens)
        if not is_same or not np.array_equal(rows.query_start_loc, self._query_start_loc):
            self._take(rows)
        is_used = np.arange(block_tables.shape[1]) < self._num_blocks[:, None]
        used = block_tables[is_used]  # [sum of num_blocks, m]
        groups = {f"block_indices.{g}": used[:, g] for g in range(used.shape[1])}
        return {**self._arrays, **groups}

    def _take(self, rows: SegmentInput) -> None:
        self._seq_lens, self._query_start_loc = rows.seq_lens, rows.query_start_loc
        self._num_blocks = -(-rows.seq_lens // self._block_size)
        begins = np.zeros(len(self._num_blocks) + 1, np.int32)
        np.cumsum(self._num_blocks, out=begins[1:])
        self._arrays = {
            "past_lens": rows.seq_lens - np.diff(rows.query_start_loc),
            "subsequence_begins": rows.query_start_loc,
            "block_indices_begins": begins,
            "max_context_len": np.asarray(rows.seq_lens.max(), np.int32),
        }
