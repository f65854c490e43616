"""Every operator in plain torch: the meaning of the word, which every kernel is held against."""

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension, in fp32 or wider. x: [..., d], gain: [d]."""
    wide = x if x.dtype is torch.float64 else x.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return gain * scaled.to(x.dtype)


def rotary_embedding(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + d/2) by position. x: [tokens, heads, d], cos and sin: [tokens, d/2]."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, element by element."""
    return F.silu(gate) * up


def kv_write(cache: Tensor, values: Tensor, slots: Tensor) -> None:
    """Store rows in place. cache: [frames, kv_heads, block_size, d], values: [tokens, kv_heads, d].

    slots: [tokens] int64, `frame * block_size + offset`; -1 stores nothing.
    """
    block_size = cache.shape[2]
    stored = slots >= 0
    if not bool(stored.all()):
        slots, values = slots[stored], values[stored]
    cache[slots // block_size, :, slots % block_size] = values


def tier_exit(
    hidden: Tensor, exit_rows: Tensor, tiers: Tensor, gains: Tensor, eps: float
) -> Tensor:
    """Rows that leave the model, normalised with the gain of their tier.

    hidden: [tokens, hidden]; exit_rows, tiers: [exits] integers; gains: [tiers, hidden].
    Returns [exits, hidden].
    """
    return rms_norm(hidden[exit_rows], gains[tiers], eps)


def variant_delta(
    y: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    variant_starts: list[int],
    run_variants: list[int],
) -> None:
    """y += (x A) B in place, for each variant run's rows with the run's own A and B.

    y: [tokens, out]; x: [tokens, in]; a: [variants, in, rank]; b: [variants, rank, out]; run i has
    rows `variant_starts[i]` to `variant_starts[i + 1]`, maybe none, and `run_variants[i]`: v uses
    a[v - 1] and b[v - 1]; 0 is the base, whose rows are left alone.
    """
    for i, variant in enumerate(run_variants):
        rows = slice(variant_starts[i], variant_starts[i + 1])
        if variant:
            y[rows] += x[rows] @ a[variant - 1] @ b[variant - 1]


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_start_loc: list[int],
    seq_lens: list[int],
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Causal attention of packed rows over a paged cache that already holds their keys and values.

    query: [tokens, heads, d]; caches: [frames, kv_heads, block_size, d]; block_tables: [reqs,
    blocks] int64; request r has rows `query_start_loc[r]` to `query_start_loc[r + 1]`, the last of
    its `seq_lens[r]` tokens. `window`: tokens a row sees, itself included.
    Returns [tokens, heads, d].
    """
    num_kv_heads, block_size, head_dim = key_cache.shape[1:]
    out = torch.empty_like(query)
    for r, length in enumerate(seq_lens):
        begin, end = query_start_loc[r], query_start_loc[r + 1]
        first, mask = 0, None
        num_rows = end - begin
        if window is not None:
            first = max(0, length - num_rows - window + 1) // block_size
        frames = block_tables[r, first : -(-length // block_size)]
        first *= block_size
        key, value = (
            cache[frames].transpose(0, 1).reshape(num_kv_heads, -1, head_dim)[:, : length - first]
            for cache in (key_cache, value_cache)
        )
        if num_rows > 1 or window is not None:
            row = torch.arange(length - num_rows, length)[:, None]
            column = torch.arange(first, length)[None]
            mask = column <= row
            if window is not None:
                mask &= column > row - window
        attended = F.scaled_dot_product_attention(
            query[begin:end].transpose(0, 1)[None],
            key[None],
            value[None],
            attn_mask=mask,
            scale=scale,
            enable_gqa=True,
        )
        out[begin:end] = attended[0].transpose(0, 1)
    return out
