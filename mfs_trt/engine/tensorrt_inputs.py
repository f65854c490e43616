"""What TensorRT plans read next to the description's inputs: `SegmentInput` → arrays. Pure.

One class for each way in which a plan attends. Plugins read `SegmentInput` nearly as it is. The
native layers write keys and values frame by frame and attend over padded queries:

* `num_frames` here counts the arena's frames and the scratch frames behind them, into which rows
  are written that exist already (slot -1): nothing reads those.
* A request's rows are cut into *lanes* of at most `MAX_LANE_WIDTH` queries, so that a long chunk
  does not pad every decoding request to its length.
"""

from collections.abc import Callable
from typing import Protocol

import numpy as np

from mfs_trt.engine.interface import EngineLimits, KVCacheSpec, SegmentInput
from mfs_trt.engine.tensorrt_llm_inputs import GptAttentionInputs
from mfs_trt.errors import EngineError

MAX_LANE_WIDTH = 64  # queries of one request that share a copy of its keys and values


class AttentionInputs(Protocol):
    """What the plans of one way of attention read; for one engine's sizes."""

    @property
    def num_scratch_frames(self) -> int:
        """Frames that the plans want behind the arena's own."""
        ...

    @property
    def is_recordable(self) -> bool:
        """Whether a run may be replayed: all it reads is on the device."""
        ...

    def segment(self, rows: SegmentInput, num_blocks: int | None = None) -> dict[str, np.ndarray]:
        """Arrays by input name, all int32 but some of those that are read on the host (`host_…`).

        `num_blocks`: columns of the block tables, by default as many as the longest request has.
        """
        ...


class PortableInputs:
    """Of `builder.emitters.tensorrt_portable`."""

    is_recordable = True

    def __init__(self, limits: EngineLimits, kv_spec: KVCacheSpec) -> None:
        self._block_size = kv_spec.block_size
        self._num_scratch = num_scratch_frames(limits, kv_spec.block_size)
        self._num_frames = kv_spec.num_frames + self._num_scratch

    @property
    def num_scratch_frames(self) -> int:
        return self._num_scratch

    def segment(self, rows: SegmentInput, num_blocks: int | None = None) -> dict[str, np.ndarray]:
        sizes = (self._num_frames, self._num_scratch, self._block_size)
        return attention_inputs(rows, *sizes, num_blocks=num_blocks)


class PluginInputs:
    """Of `builder.emitters.tensorrt_plugins`: rows are packed, and slot -1 stores nothing."""

    num_scratch_frames = 0
    is_recordable = True

    def __init__(self, limits: EngineLimits, kv_spec: KVCacheSpec) -> None:
        self._block_size = kv_spec.block_size

    def segment(self, rows: SegmentInput, num_blocks: int | None = None) -> dict[str, np.ndarray]:
        """`slot_mapping` [num_rows, m], `block_tables` [num_reqs, num_blocks, m],
        `query_start_loc` [num_reqs + 1], `seq_lens` [num_reqs].
        """
        num_blocks = num_blocks or -(-int(rows.seq_lens.max()) // self._block_size)
        return {
            "slot_mapping": rows.slot_mapping,
            "block_tables": rows.block_tables[:, :num_blocks],
            "query_start_loc": rows.query_start_loc,
            "seq_lens": rows.seq_lens,
        }


_INPUTS: dict[str, Callable[[EngineLimits, KVCacheSpec], AttentionInputs]] = {
    "portable": PortableInputs,
    "plugin": PluginInputs,
    "gpt_attention": GptAttentionInputs,
}


def make_inputs(attention: str, limits: EngineLimits, kv_spec: KVCacheSpec) -> AttentionInputs:
    """Of plans that attend in the way that their manifest names; raises `EngineError`."""
    if attention not in _INPUTS:
        raise EngineError(
            f"attention: expected {', '.join(_INPUTS)}, got {attention!r}; build the engine again"
        )
    return _INPUTS[attention](limits, kv_spec)


def num_scratch_frames(limits: EngineLimits, block_size: int) -> int:
    """Frames that one step's rows fill at most."""
    return -(-limits.max_num_batched_tokens // block_size)


def attention_inputs(
    rows: SegmentInput,
    num_frames: int,
    num_scratch: int,
    block_size: int,
    num_blocks: int | None = None,
) -> dict[str, np.ndarray]:
    """Arrays by input name, all int32.

    `lane_rows` [lanes, width]: row of each padded query, 0 where there is none;
    `lane_positions` [lanes, width]: its position, 0 where there is none (it sees the first key);
    `lane_lengths` [lanes]: keys that its request has, what lies behind them is not to be read;
    `row_queries` [num_rows]: the padded query, `lane * width + i`, of each row;
    `key_positions` [blocks * block_size]; per layer group `block_tables.{group}` [lanes, blocks]
    and what `write_inputs` gives.
    """
    lane_of_row, offset_of_row, request_of_lane, width = _lanes(rows.query_start_loc)
    shape = (len(request_of_lane), width)
    lane_rows, lane_positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    lane_rows[lane_of_row, offset_of_row] = np.arange(rows.num_rows)
    lane_positions[lane_of_row, offset_of_row] = rows.positions
    num_blocks = num_blocks or -(-int(rows.seq_lens.max()) // block_size)
    tables = rows.block_tables[request_of_lane, :num_blocks]  # [lanes, blocks, m]
    arrays = {
        "lane_rows": lane_rows,
        "lane_positions": lane_positions,
        "lane_lengths": rows.seq_lens[request_of_lane].astype(np.int32),
        "row_queries": (lane_of_row * width + offset_of_row).astype(np.int32),
        "key_positions": np.arange(num_blocks * block_size, dtype=np.int32),
    }
    for group in range(tables.shape[2]):
        arrays[f"block_tables.{group}"] = np.ascontiguousarray(tables[:, :, group])
        written = write_inputs(rows.slot_mapping[:, group], num_frames, num_scratch, block_size)
        arrays |= {f"{name}.{group}": array for name, array in written.items()}
    return arrays


def write_inputs(
    slots: np.ndarray, num_frames: int, num_scratch: int, block_size: int
) -> dict[str, np.ndarray]:
    """Where rows are written: `slots` [num_rows], -1 for rows that exist already.

    `rows_by_frame` [num_rows]: rows in the order of their frames; `frame_row_starts`
    [num_frames + 1]: cumulative rows per frame; `frame_offsets` [num_frames]: the first slot
    written in each. A frame's new slots are adjacent.
    """
    exists = slots < 0
    scratch = (num_frames - num_scratch) * block_size + np.arange(np.count_nonzero(exists))
    slots = slots.astype(np.int64)
    slots[exists] = scratch
    order = np.argsort(slots, kind="stable")
    frames, offsets = np.divmod(slots[order], block_size)
    starts = np.zeros(num_frames + 1, np.int32)
    np.cumsum(np.bincount(frames, minlength=num_frames), out=starts[1:])
    first_offsets = np.zeros(num_frames, np.int32)
    first_offsets[frames[::-1]] = offsets[::-1]
    within = np.arange(len(slots)) - starts[frames]
    assert (offsets == first_offsets[frames] + within).all(), "new slots of a frame have a gap"
    return {
        "rows_by_frame": order.astype(np.int32),
        "frame_row_starts": starts,
        "frame_offsets": first_offsets,
    }


def _lanes(query_start_loc: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Lane and offset of each row [num_rows], request of each lane [lanes], lanes' width."""
    counts = np.diff(query_start_loc)
    width = min(int(counts.max()), MAX_LANE_WIDTH)
    lanes = -(-counts // width)  # [num_reqs]
    first_lane = np.cumsum(lanes) - lanes
    request = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(query_start_loc[-1]) - query_start_loc[:-1][request]
    lane, offset = np.divmod(within, width)
    return first_lane[request] + lane, offset, np.repeat(np.arange(len(counts)), lanes), width
