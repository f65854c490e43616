"""How plans are bound to the arena: by its tensors, or by addresses that a plugin is told of.

`arena[i]` are keys and values of the i-th layer of a layer group, [num_frames, num_kv_heads,
block_size, head_dim] each.
"""

from collections.abc import Sequence

import torch

Arena = Sequence[Sequence[torch.Tensor]]


def new_arena(
    attention: str, like: torch.Tensor, shape: tuple[int, ...], group_size: int
) -> list[list[torch.Tensor]]:
    """Zeros in the type and on the device of `like`."""
    if attention == "gpt_attention":  # finds values by counting on from the first keys
        return [list(like.new_zeros((2, *shape))) for _ in range(group_size)]
    return [[like.new_zeros(shape) for _ in range(2)] for _ in range(group_size)]


def arena_tensors(attention: str, arena: Arena, num_groups: int) -> dict[str, torch.Tensor]:
    """What a segment of `num_groups` layer groups is bound to, by name of input or output."""
    if attention == "gpt_attention":
        return {"host_kv_cache_pool_pointers": _pool_pointers(arena, num_groups)}
    tensors = {}
    for group in range(num_groups):
        for i, pair in enumerate(arena):
            for kind, tensor in zip(("key_cache", "value_cache"), pair, strict=True):
                tensors[f"{kind}.{group}.{i}"] = tensor
                tensors[f"new_{kind}.{group}.{i}"] = tensor  # written in place
    return tensors


def _pool_pointers(arena: Arena, num_groups: int) -> torch.Tensor:
    """[layers, 2] int64 on the host: where the layer's keys begin, and no second memory."""
    addresses = [(keys.data_ptr(), 0) for keys, _ in arena] * num_groups
    return torch.tensor(addresses, dtype=torch.int64)
