"""One segment's rows of made-up requests, as a `SegmentInput`."""

from collections.abc import Sequence

import numpy as np

from mfs_trt.engine.interface import SegmentInput


def packed_rows(
    items: Sequence[tuple[int, int]], m: int = 1, block_size: int = 4, stride: int = 10
) -> SegmentInput:
    """Request r has tokens `items[r]`, first and last, in frames `r * stride + 1` and following."""
    positions = np.concatenate([np.arange(first, last) for first, last in items])
    request = np.repeat(np.arange(len(items)), [last - first for first, last in items])
    max_blocks = -(-max(last for _, last in items) // block_size)
    tables = stride * np.arange(len(items))[:, None] + np.arange(max_blocks) + 1
    tables = np.stack([tables + 100 * group for group in range(m)], axis=2)
    frames = tables[request, positions // block_size]
    none = np.full(len(positions), -1, np.int32)
    return SegmentInput(
        source_rows=np.arange(len(positions), dtype=np.int32),
        positions=positions.astype(np.int32),
        slot_mapping=(frames * block_size + (positions % block_size)[:, None]).astype(np.int32),
        query_start_loc=np.cumsum([0, *(b - a for a, b in items)], dtype=np.int32),
        seq_lens=np.array([last for _, last in items], np.int32),
        block_tables=tables.astype(np.int32),
        variant_ids=np.zeros_like(none),
        save_features=none,
        exit_rows=none[:0],
    )
