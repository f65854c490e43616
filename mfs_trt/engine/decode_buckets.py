"""Decode-shaped rows and the sizes they are padded to, so that few shapes serve all of them. Pure.

A recorded run has fixed shapes: what it is replayed for is padded to the next of a few sizes, a
*bucket*. Rows behind the real ones belong to requests of their own, of one token whose key and
value are not stored (slot -1) and which sees the null frame; no real row reads what they give.
"""

from bisect import bisect_left
from dataclasses import dataclass, replace

import numpy as np

from mfs_trt.engine.interface import NULL_FRAME, EngineLimits, SegmentInput


@dataclass(frozen=True)
class DecodeBucket:
    """Shapes of one recorded run of a segment."""

    num_rows: int
    num_blocks: int  # of each row of the block table


class DecodeBuckets:
    """The buckets of one engine."""

    def __init__(self, limits: EngineLimits, block_size: int) -> None:
        self._block_size = block_size
        self.row_sizes = padded_sizes(min(limits.max_num_seqs, limits.max_num_batched_tokens))
        self.block_sizes = padded_sizes(-(-limits.max_model_len // block_size))

    @property
    def max_rows(self) -> int:
        return self.row_sizes[-1]

    def choose(self, rows: SegmentInput) -> DecodeBucket | None:
        """The least bucket that holds the rows; None where they are not decode-shaped.

        Decode-shaped: one row of each request, not more than the engine's limits allow.
        """
        if not np.array_equal(rows.query_start_loc, np.arange(rows.num_rows + 1)):
            return None
        num_rows = self.rows_for(rows.num_rows)
        num_blocks = _next(self.block_sizes, -(-int(rows.seq_lens.max()) // self._block_size))
        if num_rows is None or num_blocks is None:
            return None
        return DecodeBucket(num_rows, num_blocks)

    def rows_for(self, num_rows: int) -> int | None:
        """The least size that holds `num_rows`; None where none does."""
        return _next(self.row_sizes, num_rows)


def padded_sizes(greatest: int) -> tuple[int, ...]:
    """1, 2, 3, 4, 6, 8, 12, … and `greatest`: padding adds less than half of what is padded."""
    sizes, power = {greatest}, 1
    while power < greatest:
        sizes |= {size for size in (power, power * 3 // 2) if size < greatest}
        power *= 2
    return tuple(sorted(sizes))


def pad_rows(rows: SegmentInput, bucket: DecodeBucket) -> SegmentInput:
    """Decode-shaped rows in the shapes of a bucket that holds them; `exit_rows` are as they were.

    Block tables lose or gain columns that no request of these lengths reads.
    """
    extra = bucket.num_rows - rows.num_rows
    kept = rows.block_tables[:, : bucket.num_blocks]
    width = (0, bucket.num_blocks - kept.shape[1])
    tables = np.pad(kept, ((0, extra), width, (0, 0)), constant_values=NULL_FRAME)
    return replace(
        rows,
        source_rows=pad_array(rows.source_rows, bucket.num_rows, 0),
        positions=pad_array(rows.positions, bucket.num_rows, 0),
        slot_mapping=pad_array(rows.slot_mapping, bucket.num_rows, -1),
        query_start_loc=np.arange(bucket.num_rows + 1, dtype=rows.query_start_loc.dtype),
        seq_lens=pad_array(rows.seq_lens, bucket.num_rows, 1),
        block_tables=tables,
        variant_ids=pad_array(rows.variant_ids, bucket.num_rows, 0),
        save_features=pad_array(rows.save_features, bucket.num_rows, -1),
    )


def pad_array(array: np.ndarray, length: int, value: int) -> np.ndarray:
    """`array` [n, …] followed by rows of `value`, [length, …]."""
    rest = np.full((length - len(array), *array.shape[1:]), value, array.dtype)
    return np.concatenate([array, rest])


def _next(sizes: tuple[int, ...], size: int) -> int | None:
    i = bisect_left(sizes, size)
    return sizes[i] if i < len(sizes) else None
