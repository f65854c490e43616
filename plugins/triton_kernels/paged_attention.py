"""Paged attention: prefill chunks and decode in one kernel over block tables.

A program serves one KV head for a tile of one request's rows, every query head of the group in the
same tile, so that keys and values are read once for all of them. Long contexts are split over keys:
each split writes its share with the logarithm of its weight, and a second kernel merges them.
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

LOG2_E = tl.constexpr(1.4426950408889634)
DECODE_TILE_ROWS = 16  # query rows in a tile, heads of a group counted; the least of a tensor core
PREFILL_TILE_ROWS = 64
MAX_SPLITS = 32
MIN_KEYS_PER_SPLIT = 256


@triton.jit(do_not_specialize=["num_rows", "num_reqs", "num_frames", "max_blocks"])
def paged_attention_kernel(
    query,
    key_cache,
    value_cache,
    block_tables,
    query_start_loc,
    seq_lens,
    num_rows,
    num_reqs,
    num_frames,
    max_blocks,
    out,
    weights,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,  # layer groups in the block table
    GROUP: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    SCALE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    TILE_HEADS: tl.constexpr,  # a power of two
    TILE_KEYS: tl.constexpr,
    TILE_DIM: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """out: [num_rows, heads, d]; split: [splits, num_rows, heads, d] fp32 and the logarithms to
    base 2 of the splits' weights, [splits, num_rows, heads] fp32.
    """
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    req, first_row, begin, end = find_run(
        query_start_loc, num_reqs, num_rows, tl.program_id(0), TILE_TOKENS
    )
    if first_row >= end:
        return
    HEADS_PER_KV: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    length = tl.minimum(tl.maximum(tl.load(seq_lens + req), 0), max_blocks * BLOCK_SIZE)

    i = tl.arange(0, TILE_TOKENS * TILE_HEADS)
    row = first_row + i // TILE_HEADS
    head_in_group = i % TILE_HEADS
    is_row = (row < end) & (head_in_group < HEADS_PER_KV)
    position = length - end + row
    row_head = row.to(tl.int64) * NUM_HEADS + kv_head * HEADS_PER_KV + head_in_group
    dim = tl.arange(0, TILE_DIM)
    is_dim = dim < HEAD_DIM
    is_stored = is_row[:, None] & is_dim[None, :]
    q = tl.load(query + row_head[:, None] * HEAD_DIM + dim[None, :], mask=is_stored, other=0.0)

    # Keys that some row of the tile sees: [first, last)
    last = length - end + tl.minimum(first_row + TILE_TOKENS, end)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - end + first_row - WINDOW + 1, 0) // TILE_KEYS * TILE_KEYS
    if NUM_SPLITS > 1:
        tiles_per_split = tl.cdiv(tl.cdiv(last - first, TILE_KEYS), NUM_SPLITS)
        first += split * tiles_per_split * TILE_KEYS
        last = tl.minimum(last, first + tiles_per_split * TILE_KEYS)

    highest = tl.full([TILE_TOKENS * TILE_HEADS], float("-inf"), tl.float32)
    total = tl.zeros([TILE_TOKENS * TILE_HEADS], tl.float32)
    attended = tl.zeros([TILE_TOKENS * TILE_HEADS, TILE_DIM], tl.float32)
    table = block_tables + req.to(tl.int64) * max_blocks * NUM_GROUPS + GROUP
    for start in range(first, last, TILE_KEYS):
        column = start + tl.arange(0, TILE_KEYS)
        is_key = column < last
        frame = tl.load(table + column // BLOCK_SIZE * NUM_GROUPS, mask=is_key, other=0)
        frame = tl.minimum(tl.maximum(frame, 0), num_frames - 1).to(tl.int64)
        slot = (frame * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + column % BLOCK_SIZE
        offset = slot[:, None] * HEAD_DIM + dim[None, :]
        is_loaded = is_key[:, None] & is_dim[None, :]
        key = tl.load(key_cache + offset, mask=is_loaded, other=0.0)
        scores = tl.dot(q, tl.trans(key), input_precision=PRECISION) * (SCALE * LOG2_E)
        is_seen = is_key[None, :] & (column[None, :] <= position[:, None])
        if WINDOW > 0:
            is_seen &= column[None, :] > position[:, None] - WINDOW
        scores = tl.where(is_seen, scores, float("-inf"))

        higher = tl.maximum(highest, tl.max(scores, 1))
        # A row that has seen nothing yet has no finite maximum to subtract.
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        share = tl.exp2(scores - shift[:, None])
        kept = tl.exp2(highest - shift)
        total = total * kept + tl.sum(share, 1)
        value = tl.load(value_cache + offset, mask=is_loaded, other=0.0)
        attended = attended * kept[:, None]
        attended += tl.dot(share.to(value.dtype), value, input_precision=PRECISION)
        highest = higher

    total = tl.where(total == 0.0, 1.0, total)  # a split in which the row sees no key
    attended = attended / total[:, None]
    if NUM_SPLITS > 1:
        row_head += split.to(tl.int64) * num_rows * NUM_HEADS
        tl.store(weights + row_head, highest + tl.log2(total), mask=is_row)
    target = out + row_head[:, None] * HEAD_DIM + dim[None, :]
    tl.store(target, attended.to(out.dtype.element_ty), mask=is_stored)


@triton.jit(do_not_specialize=["num_rows"])
def merge_splits_kernel(
    partial,
    weights,
    num_rows,
    out,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    TILE_SPLITS: tl.constexpr,
    TILE_DIM: tl.constexpr,
):
    """partial: [splits, num_rows, heads, d] fp32, weights: [splits, num_rows, heads] fp32."""
    row_head = tl.program_id(0).to(tl.int64) * NUM_HEADS + tl.program_id(1)
    split = tl.arange(0, TILE_SPLITS)
    is_split = split < NUM_SPLITS
    part = split.to(tl.int64) * num_rows * NUM_HEADS + row_head
    weight = tl.load(weights + part, mask=is_split, other=float("-inf"))
    share = tl.exp2(weight - tl.max(weight, 0))
    dim = tl.arange(0, TILE_DIM)
    is_dim = dim < HEAD_DIM
    offset = part[:, None] * HEAD_DIM + dim[None, :]
    parts = tl.load(partial + offset, mask=is_split[:, None] & is_dim[None, :], other=0.0)
    merged = tl.sum(parts * share[:, None], 0) / tl.sum(share, 0)
    target = out + row_head * HEAD_DIM + dim
    tl.store(target, merged.to(out.dtype.element_ty), mask=is_dim)


def specialize(
    dtype: str,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    scale: float,
    window: int | None = None,
    num_groups: int = 1,
    group: int = 0,
    num_splits: int = 1,
    tile_rows: int = DECODE_TILE_ROWS,
) -> Specialization:
    """`tile_rows`: query rows of a tile, heads of a KV head's group counted; rounded up to fit."""
    assert num_heads % num_kv_heads == 0, (num_heads, num_kv_heads)
    tile_heads = triton.next_power_of_2(num_heads // num_kv_heads)
    is_split = num_splits > 1
    parameters = {
        **dict.fromkeys(("query", "key_cache", "value_cache"), pointer(dtype)),
        **dict.fromkeys(("block_tables", "query_start_loc", "seq_lens"), INDEX),
        **dict.fromkeys(("num_rows", "num_reqs", "num_frames", "max_blocks"), INTEGER),
        "out": FLOAT32 if is_split else pointer(dtype),
    }
    constants = {
        "NUM_HEADS": num_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "NUM_GROUPS": num_groups,
        "GROUP": group,
        "WINDOW": window or 0,
        "SCALE": scale,
        "NUM_SPLITS": num_splits,
        "TILE_TOKENS": max(1, tile_rows // tile_heads),
        "TILE_HEADS": tile_heads,
        "TILE_KEYS": 32,
        "TILE_DIM": max(16, triton.next_power_of_2(head_dim)),
        "PRECISION": dot_precision(dtype),
    }
    if is_split:
        parameters["weights"] = FLOAT32
    else:
        constants["weights"] = None
    # Five stages: entries of the block table and two tiles of keys and values are on their way
    # while a third is used. Where rows are many, arithmetic hides the loads, and takes the room.
    num_stages = 5 if tile_rows <= DECODE_TILE_ROWS and dtype != "float32" else 2
    return Specialization(paged_attention_kernel, parameters, constants, num_stages=num_stages)


def specialize_merge(
    dtype: str, *, num_heads: int, head_dim: int, num_splits: int
) -> Specialization:
    return Specialization(
        merge_splits_kernel,
        {"partial": FLOAT32, "weights": FLOAT32, "num_rows": INTEGER, "out": pointer(dtype)},
        {
            "NUM_HEADS": num_heads,
            "HEAD_DIM": head_dim,
            "NUM_SPLITS": num_splits,
            "TILE_SPLITS": triton.next_power_of_2(num_splits),
            "TILE_DIM": triton.next_power_of_2(head_dim),
        },
    )


def attention_grid(spec: Specialization, num_rows, num_reqs) -> tuple:
    """Programs along x, y, z; takes symbols as well."""
    constants = spec.constants
    num_tiles = num_run_tiles(num_rows, num_reqs, constants["TILE_TOKENS"])
    return num_tiles, constants["NUM_KV_HEADS"], constants["NUM_SPLITS"]


def choose_tile_rows(num_rows: int, num_reqs: int) -> int:
    """Large tiles read keys less often; small ones waste less where most requests have one row."""
    return PREFILL_TILE_ROWS if num_rows >= 8 * num_reqs else DECODE_TILE_ROWS


def choose_num_splits(num_programs: int, max_seq_len: int, num_processors: int) -> int:
    """Splits over keys: enough programs for the GPU, and each with enough keys to pay for a merge.

    num_programs: programs without splits; num_processors: streaming multiprocessors.
    """
    wanted = 2 * num_processors // max(1, num_programs)
    return max(1, min(wanted, max_seq_len // MIN_KEYS_PER_SPLIT, MAX_SPLITS))


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int | None = None,
    *,
    group: int = 0,
    num_splits: int = 1,
    tile_rows: int | None = None,
) -> Tensor:
    """`reference.paged_attention` on device tensors.

    query: [num_rows, heads, d]; caches: [frames, kv_heads, block_size, d]; block_tables:
    [num_reqs, max_blocks, m] int32, of which layer group `group` is read; query_start_loc:
    [num_reqs + 1] int32; seq_lens: [num_reqs] int32. Returns [num_rows, heads, d].
    """
    check_contiguous(query=query, key_cache=key_cache, value_cache=value_cache)
    check_index(block_tables=block_tables, query_start_loc=query_start_loc, seq_lens=seq_lens)
    num_rows, num_heads, head_dim = query.shape
    num_frames, num_kv_heads, block_size, _ = key_cache.shape
    num_reqs, max_blocks, num_groups = block_tables.shape
    dtype = dtype_name(query.dtype)
    spec = specialize(
        dtype,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        scale=scale,
        window=window,
        num_groups=num_groups,
        group=group,
        num_splits=num_splits,
        tile_rows=tile_rows or choose_tile_rows(num_rows, num_reqs),
    )
    inputs = (query, key_cache, value_cache, block_tables, query_start_loc, seq_lens)
    sizes = (num_rows, num_reqs, num_frames, max_blocks)
    grid = attention_grid(spec, num_rows, num_reqs)
    out = torch.empty_like(query)
    if num_splits == 1:
        spec.launch(grid, *inputs, *sizes, out)
        return out
    partial = query.new_empty((num_splits, *query.shape), dtype=torch.float32)
    weights = query.new_empty((num_splits, num_rows, num_heads), dtype=torch.float32)
    spec.launch(grid, *inputs, *sizes, partial, weights)
    merge = specialize_merge(dtype, num_heads=num_heads, head_dim=head_dim, num_splits=num_splits)
    merge.launch((num_rows, num_heads), partial, weights, num_rows, out)
    return out
