"""`prepare`: a scheduler's decision and block tables → the flat arrays of a `StepInput`. Pure."""

from collections.abc import Sequence

import numpy as np

from mfs_trt.engine.interface import SegmentInput, StepInput
from mfs_trt.scheduler.output import SchedulerOutput, SegmentItems


def prepare(output: SchedulerOutput, tables: Sequence[np.ndarray], block_size: int) -> StepInput:
    """Build a step's arrays.

    `tables[s]`: [num_rows, max_blocks, m] int32, the block tables of segment s by request row.
    """
    below: _Rows | None = None
    segments: list[SegmentInput | None] = []
    for items, table in zip(output.segments, tables, strict=True):
        if items is None:
            segments.append(None)
            continue
        rows = _Rows(items)
        segments.append(_segment_input(rows, below, table, block_size))
        below = rows
    return StepInput(input_ids=output.input_ids, segments=tuple(segments))


class _Rows:
    """One segment's rows: for each row its item and its position."""

    def __init__(self, items: SegmentItems) -> None:
        counts = items.last_tokens - items.first_tokens
        self.items = items
        self.starts = np.zeros(len(counts) + 1, np.int32)  # [num_items + 1]
        np.cumsum(counts, out=self.starts[1:])
        self.item_of_row = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        offsets = items.first_tokens - self.starts[:-1]
        self.positions = (
            np.arange(self.starts[-1], dtype=np.int32) + offsets[self.item_of_row]
        ).astype(np.int32)


def _segment_input(
    rows: _Rows, below: _Rows | None, table: np.ndarray, block_size: int
) -> SegmentInput:
    items = rows.items
    num_blocks = -(-int(items.last_tokens.max()) // block_size)
    block_tables = table[items.rows, :num_blocks]  # [num_items, num_blocks, m]
    frames = block_tables[rows.item_of_row, rows.positions // block_size]  # [num_rows, m]
    return SegmentInput(
        source_rows=_source_rows(rows, below),
        positions=rows.positions,
        slot_mapping=frames * np.int32(block_size) + (rows.positions % block_size)[:, None],
        query_start_loc=rows.starts,
        seq_lens=items.last_tokens,
        block_tables=block_tables,
        variant_ids=np.zeros(len(rows.positions), np.int32),
        save_features=np.full(len(rows.positions), -1, np.int32),
        exit_rows=rows.starts[items.exit_items + 1] - 1,
    )


def _source_rows(rows: _Rows, below: _Rows | None) -> np.ndarray:
    """Row of the segment below that computes the same token in this step.

    Segment 0 reads `input_ids`.
    """
    num_rows = len(rows.positions)
    if below is None:
        return np.arange(num_rows, dtype=np.int32)
    size = int(max(below.items.rows.max(), rows.items.rows.max())) + 1
    item_below = np.full(size, -1, np.int32)
    item_below[below.items.rows] = np.arange(len(below.items.rows), dtype=np.int32)
    item = item_below[rows.items.rows][rows.item_of_row]
    first, last = below.items.first_tokens[item], below.items.last_tokens[item]
    inside = (item >= 0) & (rows.positions >= first) & (rows.positions < last)
    assert inside.all(), "a row has no source: the segment below does not compute it in this step"
    return below.starts[item] + rows.positions - first
