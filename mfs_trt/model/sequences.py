"""Whole sequences through the nested model, as training and evaluation see it: no cache, no
blocks.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mfs_trt.model.blocks import Attend
from mfs_trt.model.transformer import NestedModel


def boundaries(
    model: NestedModel,
    input_ids: Tensor,
    last_segment: int | None = None,
    *,
    recompute_layers: bool = False,
) -> list[Tensor]:
    """Hidden states above each segment up to `last_segment`, every sequence causal from position 0.

    input_ids: [sequences, length] int64 → per segment [sequences, length, hidden].
    `recompute_layers` keeps one hidden state per layer for the backward pass and computes the rest
    of the layer again (activation checkpointing).
    """
    num_sequences, length = input_ids.shape
    positions = torch.arange(length, device=input_ids.device).repeat(num_sequences)
    cos, sin = model.rope_cos[positions], model.rope_sin[positions]
    attend = causal_attention(model, num_sequences, length)
    x = model.embed(input_ids.flatten())
    segments = model.family.segments
    hidden = []
    for segment in segments if last_segment is None else segments[: last_segment + 1]:
        for i in range(segment.first_layer, segment.last_layer):
            if recompute_layers:
                x = checkpoint(model.layers[i], x, cos, sin, attend, use_reentrant=False)
            else:
                x = model.layers[i](x, cos, sin, attend)
        hidden.append(x.unflatten(0, (num_sequences, length)))
    return hidden


def causal_attention(model: NestedModel, num_sequences: int, length: int) -> Attend:
    """How the rows of `num_sequences` sequences of one length see each other."""
    config = model.family.model
    groups = config.num_heads // config.num_kv_heads

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        # On CPUs only equal head counts take the fused kernel, so keys and values are repeated.
        query, key, value = (
            t.unflatten(0, (num_sequences, length)).transpose(1, 2)
            for t in (query, key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1))
        )
        window = config.layer_window(layer)
        if window is None or window >= length:
            out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            row = torch.arange(length, device=query.device)
            distance = row[:, None] - row[None]
            mask = (distance >= 0) & (distance < window)
            out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return out.transpose(1, 2).flatten(0, 1)

    return attend
