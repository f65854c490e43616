"""Tiles over runs: batch rows come in runs (a request's, a variant's), and no tile crosses two.

    rows    0                 5 5     8
    runs    | run 0           |1| 2   |        starts = [0, 5, 5, 8], run 1 is empty
    tiles   |0      |1        | |3    |        of 4 rows

Run r's first tile is `starts[r] // tile_rows + r`, so that a tile finds its run by bisection and
needs no list made for it. At most one tile a run has no rows; it ends at once.
"""

import triton
import triton.language as tl


def num_run_tiles(num_rows, num_runs, tile_rows: int):
    """Upper bound of the tiles over `num_rows` rows in `num_runs` runs; takes symbols as well."""
    return num_rows // tile_rows + num_runs


@triton.jit
def find_run(starts, num_runs, num_rows, tile, TILE_ROWS: tl.constexpr):
    """The tile's run, and its rows: run, first row of the tile, first and last row of the run.

    Starts are clamped to the rows there are: TensorRT times a plugin on arbitrary data.
    """
    low = 0
    high = num_runs
    while high - low > 1:
        middle = (low + high) // 2
        start = tl.minimum(tl.maximum(tl.load(starts + middle), 0), num_rows)
        if start // TILE_ROWS + middle <= tile:
            low = middle
        else:
            high = middle
    begin = tl.minimum(tl.maximum(tl.load(starts + low), 0), num_rows)
    end = tl.minimum(tl.maximum(tl.load(starts + low + 1), 0), num_rows)
    first = begin + (tile - begin // TILE_ROWS - low) * TILE_ROWS
    return low, first, begin, end
