"""BlockTables: the frame ids of every running request, one persistent array per segment.

A running request owns a *row*, the same in every segment's array, so a step's tables are one gather
by row.
"""

import numpy as np

from mfs_trt.engine.interface import NULL_FRAME, KVCacheSpec
from mfs_trt.kv_cache.block_pool import Block


class BlockTables:
    """`segments[s]`: [num_rows, max_blocks, m] int32 frames; `features[s]`: [num_rows, max_blocks]
    int32 blocks of the feature pool above segment s. Padded with the null frame.
    """

    def __init__(self, spec: KVCacheSpec, num_rows: int, max_model_len: int) -> None:
        max_blocks = -(-max_model_len // spec.block_size)
        self.segments = tuple(
            np.full((num_rows, max_blocks, m), NULL_FRAME, np.int32)
            for m in spec.groups_per_segment
        )
        self.features = tuple(
            np.full((num_rows, max_blocks), NULL_FRAME, np.int32)
            for _ in spec.groups_per_segment[:-1]
        )
        self._free_rows = list(range(num_rows - 1, -1, -1))

    def open_row(self) -> int:
        """A row for a request that starts to run; the caller limits how many run."""
        return self._free_rows.pop()

    def append(self, row: int, segment: int, index: int, block: Block) -> None:
        """Block number `index` of the request at `row`."""
        self.segments[segment][row, index] = block.frames

    def set_features(self, row: int, boundary: int, blocks: dict[int, Block]) -> None:
        """The blocks of features that the request at `row` keeps, by number."""
        table = self.features[boundary]
        table[row] = NULL_FRAME
        for index, block in blocks.items():
            table[row, index] = block.frames[0]

    def cut(self, row: int, first_segment: int) -> None:
        """Forget the request's blocks in `first_segment` and above."""
        for table in self.segments[first_segment:]:
            table[row] = NULL_FRAME

    def close_row(self, row: int) -> None:
        """Give the row back, all null frames again: no table names another request's frames."""
        for table in (*self.segments, *self.features):
            table[row] = NULL_FRAME
        self._free_rows.append(row)
