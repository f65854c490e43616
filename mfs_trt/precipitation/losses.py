"""Losses of a nested model: one per exit, from logits of a few rows at a time. Pure functions."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from mfs_trt.precipitation.config import PrecipitationConfig


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum over rows, in fp32 or wider. logits: [rows, vocab_size], labels: [rows] int64."""
    return F.cross_entropy(_wide(logits), labels, reduction="sum")


def distillation(
    student: Tensor, teacher: Tensor, temperature: float = 1.0, top_n: int = 0
) -> Tensor:
    """T² · KL(teacher ‖ student) at temperature T, summed over rows (Hinton et al., 2015).

    student, teacher: logits [rows, vocab_size]; no gradient reaches the teacher. With `top_n` the
    teacher is its n most likely tokens, renormalised.
    """
    log_q = F.log_softmax(_wide(student) / temperature, dim=-1)
    scaled = _wide(teacher.detach()) / temperature
    if top_n and top_n < scaled.shape[-1]:
        scaled, tokens = scaled.topk(top_n, dim=-1)
        log_q = log_q.gather(-1, tokens)
    log_p = F.log_softmax(scaled, dim=-1)
    return temperature**2 * (log_p.exp() * (log_p - log_q)).sum()


def exit_losses(
    config: PrecipitationConfig,
    logits: Sequence[Tensor],
    labels: Tensor,
    anchor: Tensor | None = None,
) -> Tensor:
    """Loss of every exit, summed over rows. → [num_exits].

    logits: of the trained exits from shallow to deep, [rows, vocab_size] each; the last is the top
    tier, teacher of the others. anchor: logits of the untrained model, for the top tier.
    """
    top = logits[-1]
    losses = []
    for low in logits[:-1]:
        loss = low.new_zeros((), dtype=torch.float32)
        if config.distill_weight < 1:
            loss = (1 - config.distill_weight) * cross_entropy(low, labels)
        if config.distill_weight > 0:
            loss = loss + config.distill_weight * distillation(
                low, top, config.distill_temperature, config.distill_top_n
            )
        losses.append(loss)
    loss = cross_entropy(top, labels)
    if anchor is not None:
        loss = loss + config.anchor_weight * distillation(top, anchor)
    return torch.stack([*losses, loss])


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype is torch.float64 else logits.float()
