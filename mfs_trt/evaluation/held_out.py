"""Logits of every tier at every held-out position, a few rows at a time."""

from collections.abc import Iterator

import torch
from torch import Tensor

from mfs_trt.model.sequences import boundaries
from mfs_trt.model.transformer import NestedModel
from mfs_trt.precipitation.packing import IGNORED, PackedTokens

_CHUNK_NBYTES = 256 << 20  # of the logits of all tiers at once


def tier_logits(
    model: NestedModel,
    tokens: PackedTokens,
    *,
    max_sequences: int | None = None,
    batch_size: int = 4,
) -> Iterator[tuple[list[Tensor], Tensor]]:
    """Per chunk of positions: the logits of every tier, [rows, vocab_size] float32 or wider each,
    and the token that comes there, [rows] int64.

    Every sequence of `tokens` once, or `max_sequences` of them. The model's device computes.
    """
    count = min(tokens.num_sequences, max_sequences or tokens.num_sequences)
    weight = model.embed_tokens.weight
    itemsize = max(weight.dtype.itemsize, 4)
    num_exits, vocab_size = len(model.family.tiers), model.family.model.vocab_size
    chunk_rows = max(1, _CHUNK_NBYTES // (num_exits * vocab_size * itemsize))
    for first in range(0, count, batch_size):
        input_ids, labels = tokens.batch(first, min(batch_size, count - first))
        yield from _batch_logits(
            model, input_ids.to(weight.device), labels.to(weight.device), chunk_rows
        )


@torch.inference_mode()
def _batch_logits(
    model: NestedModel, input_ids: Tensor, labels: Tensor, chunk_rows: int
) -> Iterator[tuple[list[Tensor], Tensor]]:
    hidden = [h.flatten(0, 1) for h in boundaries(model, input_ids)]
    labels = labels.flatten()
    for rows in (labels != IGNORED).nonzero().squeeze(1).split(chunk_rows):
        if len(rows):
            logits = [_wide(model.exit_logits(i, h[rows])) for i, h in enumerate(hidden)]
            yield logits, labels[rows]


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype is torch.float64 else logits.float()
