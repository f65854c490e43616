"""`prepare`: a scheduler's decision and block tables → the flat arrays of a `StepInput`. Pure."""

import numpy as np

from mfs_trt.engine.interface import NULL_FRAME, SegmentInput, StepInput
from mfs_trt.kv_cache.block_tables import BlockTables
from mfs_trt.scheduler.output import SchedulerOutput, SegmentItems


def prepare(output: SchedulerOutput, tables: BlockTables, block_size: int) -> StepInput:
    """Build a step's arrays from the block tables of the requests' rows."""
    below = _Rows.none()
    segments: list[SegmentInput | None] = []
    for s, items in enumerate(output.segments):
        if items is None:
            segments.append(None)
            below = _Rows.none()
            continue
        rows = _Rows(items)
        if s == 0:
            source_rows = np.arange(len(rows.positions), dtype=np.int32)  # of `input_ids`
        else:
            source_rows = _source_rows(rows, below, tables.features[s - 1], block_size)
        features = tables.features[s] if s < len(tables.features) else None
        segments.append(_segment_input(rows, source_rows, tables.segments[s], features, block_size))
        below = rows
    return StepInput(input_ids=output.input_ids, segments=tuple(segments))


class _Rows:
    """One segment's rows: for each row its item and its position."""

    @classmethod
    def none(cls) -> "_Rows":
        """Of a segment with nothing to do."""
        empty = np.zeros(0, np.int32)
        return cls(SegmentItems(*[empty] * 7))

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
    rows: _Rows,
    source_rows: np.ndarray,
    table: np.ndarray,
    features: np.ndarray | None,
    block_size: int,
) -> SegmentInput:
    """`table`: [num_rows, max_blocks, m], `features`: [num_rows, max_blocks], by request row."""
    items, item = rows.items, rows.item_of_row
    num_blocks = -(-int(items.last_tokens.max()) // block_size)
    block_tables = table[items.rows, :num_blocks]  # [num_items, num_blocks, m]
    block, offset = np.divmod(rows.positions, np.int32(block_size))
    slots = block_tables[item, block] * np.int32(block_size) + offset[:, None]  # [num_rows, m]
    if (items.stored_from > items.first_tokens).any():
        slots[rows.positions < items.stored_from[item]] = -1
    save_features = np.full(len(rows.positions), -1, np.int32)
    if features is not None and (items.saved_from < items.last_tokens).any():
        saved = rows.positions >= items.saved_from[item]
        kept = features[items.rows[item[saved]], block[saved]]
        save_features[saved] = kept * np.int32(block_size) + offset[saved]
    return SegmentInput(
        source_rows=source_rows,
        positions=rows.positions,
        slot_mapping=slots,
        query_start_loc=rows.starts,
        seq_lens=items.last_tokens,
        block_tables=block_tables,
        variant_ids=np.zeros(len(rows.positions), np.int32),
        save_features=save_features,
        exit_rows=_last_rows(rows.starts[items.exit_items + 1], items.exit_counts),
    )


def _last_rows(ends: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The `counts[i]` rows before each `ends[i]`, in order. → [sum of counts] int32."""
    if (counts == 1).all():
        return ends - 1
    before = np.repeat(np.cumsum(counts) - counts, counts)
    return (np.repeat(ends - counts, counts) + np.arange(counts.sum()) - before).astype(np.int32)


def _source_rows(rows: _Rows, below: _Rows, features: np.ndarray, block_size: int) -> np.ndarray:
    """Row of the segment below that computes the same token in this step, or -1 - slot of its
    kept feature.
    """
    size = int(max(below.items.rows.max(initial=0), rows.items.rows.max())) + 1
    item_below = np.full(size, -1, np.int32)
    item_below[below.items.rows] = np.arange(len(below.items.rows), dtype=np.int32)
    item = item_below[rows.items.rows][rows.item_of_row]
    if len(below.positions):
        first, last = below.items.first_tokens[item], below.items.last_tokens[item]
        inside = (item >= 0) & (rows.positions >= first) & (rows.positions < last)
        source = below.starts[item] + rows.positions - first
        if inside.all():
            return source
    else:
        inside = np.zeros(len(rows.positions), bool)
        source = np.zeros(len(rows.positions), np.int32)
    outside = ~inside
    positions = rows.positions[outside]
    block = features[rows.items.rows[rows.item_of_row[outside]], positions // block_size]
    assert (block != NULL_FRAME).all(), (
        "a row has no source: neither the segment below nor a feature"
    )
    source[outside] = -1 - (block * np.int32(block_size) + positions % np.int32(block_size))
    return source
