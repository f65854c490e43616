"""Variant delta: y += (x A) B for each variant run's rows, with the run's own A and B.

Two kernels. The first projects rows to the delta's rank, split over the inputs so that a handful of
decode rows still fills the GPU; the second adds up the splits, projects back and adds to y. Sums
have a fixed order: the same rows give the same bits in any batch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mfs_trt.plugins.triton_kernels.runs import find_run, num_run_tiles
from mfs_trt.plugins.triton_kernels.specialization import (
    FLOAT32,
    INDEX,
    INTEGER,
    Specialization,
    check_contiguous,
    check_index,
    dot_precision,
    dtype_name,
    pointer,
)

TILE_ROWS = 16
TILE_IN = 64
TILE_OUT = 64
MAX_TILE_RANK = 64
INPUTS_PER_SPLIT = 512  # inputs that one program of the first kernel sums over, at least


@triton.jit(do_not_specialize=["num_rows", "num_runs", "num_variants"])
def project_kernel(
    x,
    a,
    variant_starts,
    run_variants,
    num_rows,
    num_runs,
    num_variants,
    projected,
    IN_SIZE: tl.constexpr,
    RANK: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_IN: tl.constexpr,
    TILE_RANK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """projected: [splits, num_rows, rank] fp32; rows of base runs are not written."""
    run, first_row, begin, end = find_run(
        variant_starts, num_runs, num_rows, tl.program_id(0), TILE_ROWS
    )
    if first_row >= end:
        return
    variant = tl.minimum(tl.load(run_variants + run), num_variants)
    if variant <= 0:
        return
    split = tl.program_id(1)
    row = first_row + tl.arange(0, TILE_ROWS)
    is_row = row < end
    rank = tl.program_id(2) * TILE_RANK + tl.arange(0, TILE_RANK)
    is_rank = rank < RANK
    factor = a + (variant - 1).to(tl.int64) * IN_SIZE * RANK
    PER_SPLIT: tl.constexpr = (IN_SIZE + NUM_SPLITS - 1) // NUM_SPLITS
    total = tl.zeros([TILE_ROWS, TILE_RANK], tl.float32)
    for offset in range(0, PER_SPLIT, TILE_IN):
        step = offset + tl.arange(0, TILE_IN)
        column = split * PER_SPLIT + step
        is_column = (step < PER_SPLIT) & (column < IN_SIZE)
        rows = tl.load(
            x + row.to(tl.int64)[:, None] * IN_SIZE + column[None, :],
            mask=is_row[:, None] & is_column[None, :],
            other=0.0,
        )
        tile = tl.load(
            factor + column[:, None] * RANK + rank[None, :],
            mask=is_column[:, None] & is_rank[None, :],
            other=0.0,
        )
        total += tl.dot(rows, tile, input_precision=PRECISION)
    target = split.to(tl.int64) * num_rows + row
    tl.store(
        projected + target[:, None] * RANK + rank[None, :],
        total,
        mask=is_row[:, None] & is_rank[None, :],
    )


@triton.jit(do_not_specialize=["num_rows", "num_runs", "num_variants"])
def add_delta_kernel(
    y,
    projected,
    b,
    variant_starts,
    run_variants,
    num_rows,
    num_runs,
    num_variants,
    out,
    OUT_SIZE: tl.constexpr,
    RANK: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    IS_IN_PLACE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_OUT: tl.constexpr,
    TILE_RANK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """out: y plus the delta; rows of base runs keep y's bits, and are not written in place."""
    run, first_row, begin, end = find_run(
        variant_starts, num_runs, num_rows, tl.program_id(0), TILE_ROWS
    )
    if first_row >= end:
        return
    variant = tl.minimum(tl.load(run_variants + run), num_variants)
    if (variant <= 0) & IS_IN_PLACE:
        return
    row = first_row + tl.arange(0, TILE_ROWS)
    is_row = row < end
    column = tl.program_id(1) * TILE_OUT + tl.arange(0, TILE_OUT)
    is_stored = is_row[:, None] & (column < OUT_SIZE)[None, :]
    place = row.to(tl.int64)[:, None] * OUT_SIZE + column[None, :]
    base = tl.load(y + place, mask=is_stored, other=0.0)
    if variant > 0:
        factor = b + (variant - 1).to(tl.int64) * RANK * OUT_SIZE
        delta = tl.zeros([TILE_ROWS, TILE_OUT], tl.float32)
        for first_rank in range(0, RANK, TILE_RANK):
            rank = first_rank + tl.arange(0, TILE_RANK)
            is_rank = rank < RANK
            is_read = is_row[:, None] & is_rank[None, :]
            rows = tl.zeros([TILE_ROWS, TILE_RANK], tl.float32)
            for split in range(NUM_SPLITS):
                source = split * num_rows.to(tl.int64) + row
                rows += tl.load(
                    projected + source[:, None] * RANK + rank[None, :], mask=is_read, other=0.0
                )
            tile = tl.load(
                factor + rank[:, None] * OUT_SIZE + column[None, :],
                mask=is_rank[:, None] & (column < OUT_SIZE)[None, :],
                other=0.0,
            )
            delta += tl.dot(rows.to(tile.dtype), tile, input_precision=PRECISION)
        changed = base.to(tl.float32) + delta
        tl.store(out + place, changed.to(out.dtype.element_ty), mask=is_stored)
    else:
        tl.store(out + place, base, mask=is_stored)


def choose_num_splits(in_size: int) -> int:
    """Of the first kernel, by the size alone: the batch must not change the order of a sum."""
    return max(1, min(16, in_size // INPUTS_PER_SPLIT))


def specialize_project(dtype: str, *, in_size: int, rank: int) -> Specialization:
    return Specialization(
        project_kernel,
        {
            **dict.fromkeys(("x", "a"), pointer(dtype)),
            **dict.fromkeys(("variant_starts", "run_variants"), INDEX),
            **dict.fromkeys(("num_rows", "num_runs", "num_variants"), INTEGER),
            "projected": FLOAT32,
        },
        {
            "IN_SIZE": in_size,
            "RANK": rank,
            "NUM_SPLITS": choose_num_splits(in_size),
            "TILE_ROWS": TILE_ROWS,
            "TILE_IN": TILE_IN,
            "TILE_RANK": _tile_rank(rank),
            "PRECISION": dot_precision(dtype),
        },
    )


def specialize_add(
    dtype: str, *, in_size: int, out_size: int, rank: int, is_in_place: bool
) -> Specialization:
    return Specialization(
        add_delta_kernel,
        {
            "y": pointer(dtype),
            "projected": FLOAT32,
            "b": pointer(dtype),
            **dict.fromkeys(("variant_starts", "run_variants"), INDEX),
            **dict.fromkeys(("num_rows", "num_runs", "num_variants"), INTEGER),
            "out": pointer(dtype),
        },
        {
            "OUT_SIZE": out_size,
            "RANK": rank,
            "NUM_SPLITS": choose_num_splits(in_size),
            "IS_IN_PLACE": is_in_place,
            "TILE_ROWS": TILE_ROWS,
            "TILE_OUT": TILE_OUT,
            "TILE_RANK": _tile_rank(rank),
            "PRECISION": dot_precision(dtype),
        },
    )


def project_grid(spec: Specialization, num_rows, num_runs) -> tuple:
    """Programs along x, y, z; takes symbols as well."""
    constants = spec.constants
    num_ranks = triton.cdiv(constants["RANK"], constants["TILE_RANK"])
    return num_run_tiles(num_rows, num_runs, TILE_ROWS), constants["NUM_SPLITS"], num_ranks


def add_grid(spec: Specialization, num_rows, num_runs) -> tuple:
    """Programs along x, y; takes symbols as well."""
    num_columns = triton.cdiv(spec.constants["OUT_SIZE"], TILE_OUT)
    return num_run_tiles(num_rows, num_runs, TILE_ROWS), num_columns


def variant_delta(
    y: Tensor, x: Tensor, a: Tensor, b: Tensor, variant_starts: Tensor, run_variants: Tensor
) -> None:
    """`reference.variant_delta` on device tensors, in place.

    y: [num_rows, out]; x: [num_rows, in]; a: [num_variants, in, rank]; b: [num_variants, rank,
    out]; variant_starts: [num_runs + 1] int32; run_variants: [num_runs] int32, 0: base.
    """
    check_contiguous(y=y, x=x, a=a, b=b)
    check_index(variant_starts=variant_starts, run_variants=run_variants)
    dtype = dtype_name(x.dtype)
    num_rows, in_size = x.shape
    num_variants, rank, out_size = b.shape
    sizes = (num_rows, len(run_variants), num_variants)
    runs = (variant_starts, run_variants)
    project = specialize_project(dtype, in_size=in_size, rank=rank)
    num_splits = project.constants["NUM_SPLITS"]
    projected = x.new_empty((num_splits, num_rows, rank), dtype=torch.float32)
    project.launch(project_grid(project, *sizes[:2]), x, a, *runs, *sizes, projected)
    add = specialize_add(dtype, in_size=in_size, out_size=out_size, rank=rank, is_in_place=True)
    add.launch(add_grid(add, *sizes[:2]), y, projected, b, *runs, *sizes, y)


def _tile_rank(rank: int) -> int:
    return min(MAX_TILE_RANK, max(16, triton.next_power_of_2(rank)))
