"""KV write: the step's keys and values into their slots of the arena, in place."""

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


@triton.jit(do_not_specialize=["num_slots"])
def kv_write_kernel(
    key,
    value,
    slots,
    key_cache,
    value_cache,
    num_slots,
    key_cache_out,
    value_cache_out,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    TILE_DIM: tl.constexpr,
):
    """One program a row. The caches come twice, as TensorRT passes an input and its alias."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row * NUM_GROUPS + GROUP).to(tl.int64)
    if (slot < 0) | (slot >= num_slots):
        return
    head = tl.arange(0, TILE_HEADS)[:, None]
    dim = tl.arange(0, TILE_DIM)[None, :]
    is_stored = (head < NUM_KV_HEADS) & (dim < HEAD_DIM)
    source = (row * NUM_KV_HEADS + head) * HEAD_DIM + dim
    frame = slot // BLOCK_SIZE
    place = (frame * NUM_KV_HEADS + head) * BLOCK_SIZE + slot % BLOCK_SIZE
    target = place * HEAD_DIM + dim
    k = tl.load(key + source, mask=is_stored)
    tl.store(key_cache_out + target, k, mask=is_stored)
    v = tl.load(value + source, mask=is_stored)
    tl.store(value_cache_out + target, v, mask=is_stored)


def specialize(
    dtype: str,
    *,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    num_groups: int = 1,
    group: int = 0,
) -> Specialization:
    caches = ("key_cache", "value_cache")
    return Specialization(
        kv_write_kernel,
        {
            **dict.fromkeys(("key", "value"), pointer(dtype)),
            "slots": INDEX,
            **dict.fromkeys(caches, pointer(dtype)),
            "num_slots": INTEGER,
            **dict.fromkeys((f"{name}_out" for name in caches), pointer(dtype)),
        },
        {
            "NUM_KV_HEADS": num_kv_heads,
            "HEAD_DIM": head_dim,
            "BLOCK_SIZE": block_size,
            "NUM_GROUPS": num_groups,
            "GROUP": group,
            "TILE_HEADS": triton.next_power_of_2(num_kv_heads),
            "TILE_DIM": triton.next_power_of_2(head_dim),
        },
    )


def kv_write(
    key: Tensor,
    value: Tensor,
    slots: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    *,
    group: int = 0,
) -> None:
    """`reference.kv_write` of keys and of values.

    key, value: [num_rows, kv_heads, d]; slots: [num_rows, m] int32, of which layer group `group` is
    read, -1 stores nothing; caches: [frames, kv_heads, block_size, d], changed in place.
    """
    check_contiguous(key=key, value=value, key_cache=key_cache, value_cache=value_cache)
    check_index(slots=slots)
    num_rows, num_kv_heads, head_dim = key.shape
    num_frames, _, block_size, _ = key_cache.shape
    spec = specialize(
        dtype_name(key.dtype),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        num_groups=slots.shape[1],
        group=group,
    )
    caches = (key_cache, value_cache)
    spec.launch((num_rows,), key, value, slots, *caches, num_frames * block_size, *caches)
