"""Shapes of real models, for which every kernel must compile on every target."""

from functools import partial

from mfs_trt.plugins.triton_kernels import kv_write, paged_attention, tier_exit, variant_delta
from mfs_trt.plugins.triton_kernels.specialization import Specialization

# dtype, heads, kv_heads, head_dim, block_size
_ATTENTION = (
    ("float16", 9, 3, 64, 32),  # SmolLM2 135M
    ("bfloat16", 32, 8, 128, 16),  # LLaMA 3 8B
    ("float16", 40, 40, 128, 32),  # LLaMA 2 13B
)


def compiled_shapes() -> dict[str, Specialization]:
    """Names with `decode` are the decode path, on which nothing may spill."""
    shapes = {}
    for dtype, heads, kv_heads, head_dim, block_size in _ATTENTION:
        attention = partial(
            paged_attention.specialize,
            dtype,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            block_size=block_size,
            scale=head_dim**-0.5,
        )
        shape = f"{dtype} {heads}/{kv_heads}x{head_dim}"
        shapes[f"paged_attention decode {shape}"] = attention()
        shapes[f"paged_attention decode split {shape}"] = attention(num_splits=8)
        large = paged_attention.PREFILL_TILE_ROWS
        shapes[f"paged_attention prefill {shape}"] = attention(tile_rows=large)
    shapes["paged_attention decode window bfloat16 40/10x80"] = paged_attention.specialize(
        "bfloat16",
        num_heads=40,
        num_kv_heads=10,
        head_dim=80,
        block_size=64,
        scale=80**-0.5,
        window=4096,
    )
    shapes["merge_splits decode float16 32x128"] = paged_attention.specialize_merge(
        "float16", num_heads=32, head_dim=128, num_splits=paged_attention.MAX_SPLITS
    )
    shapes["kv_write decode float16 40x128"] = kv_write.specialize(
        "float16", num_kv_heads=40, head_dim=128, block_size=32
    )
    shapes["tier_exit decode bfloat16 5120"] = tier_exit.specialize(
        "bfloat16", hidden_size=5120, eps=1e-5
    )
    for rank in (16, 256):
        shapes[f"variant_project decode bfloat16 5120 rank {rank}"] = (
            variant_delta.specialize_project("bfloat16", in_size=5120, rank=rank)
        )
        shapes[f"variant_delta decode bfloat16 13824 rank {rank}"] = variant_delta.specialize_add(
            "bfloat16", in_size=5120, out_size=13824, rank=rank, is_in_place=True
        )
    return shapes
