"""Losses over many rows without their logits: chunk after chunk, gradients taken on the way.

The logits of K exits over a vocabulary of 150 000 tokens would be the largest tensors of a training
step. Each chunk's are made, turned into a loss and into gradients of the rows and of the exits'
parameters, and dropped; nothing is computed twice (the fused linear cross entropy of Liger Kernel,
Hsu et al. 2024, for any loss).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

# (rows of a chunk per exit, first row, last row) → loss of each exit [num_exits], summed over rows
ChunkLosses = Callable[[Sequence[Tensor], int, int], Tensor]


def chunked_losses(
    losses_of: ChunkLosses,
    hidden: Sequence[Tensor],
    weights: Sequence[float],
    parameters: Sequence[Tensor],
    chunk_rows: int,
) -> tuple[Tensor, Tensor]:
    """Σ weights · losses, differentiable, and the losses themselves [num_exits], detached.

    hidden: per exit [rows, hidden_size]. parameters: every tensor that `losses_of` reads and that
    wants a gradient.
    """
    if not torch.is_grad_enabled():
        losses = _sum_chunks(losses_of, hidden, chunk_rows)
        return losses @ losses.new_tensor(weights), losses
    trained = [p for p in parameters if p.requires_grad]
    return _ChunkedLosses.apply(
        losses_of, len(hidden), tuple(weights), chunk_rows, *hidden, *trained
    )


def _sum_chunks(losses_of: ChunkLosses, hidden: Sequence[Tensor], chunk_rows: int) -> Tensor:
    total = None
    for first in range(0, len(hidden[0]), chunk_rows):
        last = min(first + chunk_rows, len(hidden[0]))
        losses = losses_of([h[first:last] for h in hidden], first, last)
        total = losses if total is None else total + losses
    return hidden[0].new_zeros(len(hidden), dtype=torch.float32) if total is None else total


class _ChunkedLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        losses_of: ChunkLosses,
        num_exits: int,
        weights: tuple[float, ...],
        chunk_rows: int,
        *tensors: Tensor,
    ) -> tuple[Tensor, Tensor]:
        hidden, trained = tensors[:num_exits], tensors[num_exits:]
        row_grads = [torch.empty_like(h) for h in hidden]
        grads = [torch.zeros_like(p) for p in trained]
        total: Tensor | None = None
        for first in range(0, len(hidden[0]), chunk_rows):
            last = min(first + chunk_rows, len(hidden[0]))
            rows = [h[first:last].detach().requires_grad_() for h in hidden]
            with torch.enable_grad():
                losses = losses_of(rows, first, last)
                weighted = losses @ losses.new_tensor(weights)
            found = torch.autograd.grad(weighted, [*rows, *trained], allow_unused=True)
            for whole, part in zip(row_grads, found[:num_exits], strict=True):
                whole[first:last] = 0 if part is None else part
            for whole, part in zip(grads, found[num_exits:], strict=True):
                if part is not None:
                    whole += part
            losses = losses.detach()
            total = losses if total is None else total + losses
        if total is None:
            total = hidden[0].new_zeros(num_exits, dtype=torch.float32)
        ctx.save_for_backward(*row_grads, *grads)
        ctx.mark_non_differentiable(total)
        return total @ total.new_tensor(weights), total

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
        return (None, None, None, None, *(saved * grad for saved in ctx.saved_tensors))
