"""Tier exit: rows that leave the model, gathered and normalised with the gain of their tier."""

import triton
import triton.language as tl
from torch import Tensor

from mfs_trt.plugins.triton_kernels.specialization import (
    INDEX,
    INTEGER,
    Specialization,
    check_contiguous,
    check_index,
    dtype_name,
    pointer,
)


@triton.jit(do_not_specialize=["num_rows", "num_tiers"])
def tier_exit_kernel(
    hidden,
    exit_rows,
    tiers,
    gains,
    num_rows,
    num_tiers,
    out,
    HIDDEN_SIZE: tl.constexpr,
    EPS: tl.constexpr,
    TILE_HIDDEN: tl.constexpr,
):
    """One program an exit row. Indices are clamped: TensorRT times a plugin on arbitrary data."""
    i = tl.program_id(0).to(tl.int64)
    row = tl.minimum(tl.maximum(tl.load(exit_rows + i), 0), num_rows - 1).to(tl.int64)
    tier = tl.minimum(tl.maximum(tl.load(tiers + i), 0), num_tiers - 1).to(tl.int64)
    column = tl.arange(0, TILE_HIDDEN)
    is_column = column < HIDDEN_SIZE
    x = tl.load(hidden + row * HIDDEN_SIZE + column, mask=is_column, other=0.0).to(tl.float32)
    gain = tl.load(gains + tier * HIDDEN_SIZE + column, mask=is_column, other=0.0)
    scaled = x * tl.rsqrt(tl.sum(x * x, 0) / HIDDEN_SIZE + EPS)
    normed = scaled.to(out.dtype.element_ty) * gain
    tl.store(out + i * HIDDEN_SIZE + column, normed, mask=is_column)


def specialize(dtype: str, *, hidden_size: int, eps: float) -> Specialization:
    tile_hidden = triton.next_power_of_2(hidden_size)
    return Specialization(
        tier_exit_kernel,
        {
            "hidden": pointer(dtype),
            **dict.fromkeys(("exit_rows", "tiers"), INDEX),
            "gains": pointer(dtype),
            **dict.fromkeys(("num_rows", "num_tiers"), INTEGER),
            "out": pointer(dtype),
        },
        {"HIDDEN_SIZE": hidden_size, "EPS": eps, "TILE_HIDDEN": tile_hidden},
        num_warps=4 if tile_hidden <= 4096 else 8,
    )


def tier_exit(
    hidden: Tensor, exit_rows: Tensor, tiers: Tensor, gains: Tensor, eps: float
) -> Tensor:
    """`reference.tier_exit` on device tensors.

    hidden: [num_rows, hidden]; exit_rows, tiers: [num_exits] int32; gains: [num_tiers, hidden].
    Returns [num_exits, hidden].
    """
    check_contiguous(hidden=hidden, gains=gains)
    check_index(exit_rows=exit_rows, tiers=tiers)
    num_exits = len(exit_rows)
    out = hidden.new_empty((num_exits, hidden.shape[1]))
    spec = specialize(dtype_name(hidden.dtype), hidden_size=hidden.shape[1], eps=eps)
    spec.launch((num_exits,), hidden, exit_rows, tiers, gains, len(hidden), len(gains), out)
    return out
