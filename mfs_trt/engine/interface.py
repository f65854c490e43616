"""The seam between scheduling and computing: `StepInput` → `Engine.execute` → `StepOutput`.

All arrays are numpy, flat and packed: `num_rows` counts one segment's tokens in a step, `num_reqs`
its requests. A *slot* is `frame_id * block_size + offset`. A block of a segment with `m` layer
groups occupies `m` frames.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from mfs_trt.family.spec import FamilySpec

NULL_FRAME = 0  # placeholder in block tables; never written, never freed


@dataclass(frozen=True)
class SegmentInput:
    """What one segment computes in a step; a request's rows are adjacent, ascending in position."""

    source_rows: np.ndarray  # [num_rows] int32: row of the segment below, or -1 - feature slot
    positions: np.ndarray  # [num_rows] int32
    slot_mapping: np.ndarray  # [num_rows, m] int32, -1: keys and values exist already, do not store
    query_start_loc: np.ndarray  # [num_reqs + 1] int32
    seq_lens: np.ndarray  # [num_reqs] int32: last position of the step + 1
    block_tables: np.ndarray  # [num_reqs, max_blocks, m] int32 frame ids, padded with NULL_FRAME
    variant_ids: np.ndarray  # [num_rows] int32, 0: base; rows of one variant adjacent per request
    save_features: np.ndarray  # [num_rows] int32: slot in this boundary's feature pool, or -1
    exit_rows: np.ndarray  # [num_exits] int32: rows whose logits are wanted at this segment's exit

    @property
    def num_rows(self) -> int:
        return len(self.positions)

    @property
    def num_reqs(self) -> int:
        return len(self.seq_lens)


@dataclass(frozen=True)
class StepInput:
    """One step: `segments[s]` is None where segment s has nothing to do."""

    input_ids: np.ndarray  # [num_rows of segment 0] int32
    segments: tuple[SegmentInput | None, ...]


@dataclass(frozen=True)
class StepOutput:
    """Each exit's `exit_rows`, in their order; per segment, None where there is none.

    The arrays are the engine's own: valid until its next step.
    """

    logits: tuple[np.ndarray | None, ...]  # [num_exits, vocab_size] float32 or float64
    token_ids: tuple[np.ndarray | None, ...]  # [num_exits]: the most likely token
    top_logits: tuple[np.ndarray | None, ...]  # [num_exits]: its logit; nan where a row has one

    @classmethod
    def from_logits(cls, logits: Sequence[np.ndarray | None]) -> "StepOutput":
        """For engines that leave the most likely token to the host; ties go to the lowest id."""
        token_ids = [None if rows is None else rows.argmax(axis=1) for rows in logits]
        top_logits = [
            None if rows is None or ids is None else rows[np.arange(len(ids)), ids]
            for rows, ids in zip(logits, token_ids, strict=True)
        ]
        return cls(tuple(logits), tuple(token_ids), tuple(top_logits))


@dataclass(frozen=True)
class EngineLimits:
    """What an engine folder was built for; the scheduler stays inside."""

    max_num_seqs: int = 64  # requests in a step
    max_num_batched_tokens: int = 512  # tokens in a step
    max_model_len: int = 2048  # tokens of one request


@dataclass(frozen=True)
class KVCacheSpec:
    """Sizes of the arena.

    It is `2 * group_size` tensors `[num_frames, num_kv_heads, block_size, head_dim]`.
    """

    group_size: int
    groups_per_segment: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    block_size: int
    layer_nbytes: int  # one layer's keys and values in one frame
    num_frames: int  # the null frame included
    num_feature_slots: int = 0  # rows of each boundary's feature pool; the first block is unused

    @property
    def frame_nbytes(self) -> int:
        return self.group_size * self.layer_nbytes

    @property
    def nbytes(self) -> int:
        return self.num_frames * self.frame_nbytes

    def blocks_needed(self, tier: int, num_tokens: int) -> int:
        """Blocks, over all segments, that `num_tokens` tokens of one request occupy at `tier`."""
        return -(-num_tokens // self.block_size) * (tier + 1)

    def frames_needed(self, tier: int, num_tokens: int) -> int:
        """Frames that `num_tokens` tokens of one request occupy at `tier`."""
        num_blocks = -(-num_tokens // self.block_size)
        return num_blocks * sum(self.groups_per_segment[: tier + 1])


class Engine(Protocol):
    """A built nested model bound to its KV arena. Not thread-safe: one thread owns it."""

    family: FamilySpec
    limits: EngineLimits
    kv_spec: KVCacheSpec

    def execute(self, step: StepInput) -> StepOutput:
        """Run one step: read and write the arena in place, return the wanted logits."""
        ...

    def close(self) -> None:
        """Free what the engine holds; it cannot be used afterwards."""
        ...
