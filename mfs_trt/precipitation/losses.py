"""Losses of a nested model: one per exit, from logits of a few rows at a time. Pure functions.

The gradient of an exit's loss has a closed form, so it is taken with the loss, in fewer
passes over [rows, vocab_size] than differentiating it makes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mfs_trt.precipitation.config import PrecipitationConfig


@dataclass(frozen=True)
class SoftTargets:
    """What a teacher expects at some rows, softened by `temperature`."""

    probabilities: Tensor  # [rows, n], fp32 or wider; a row sums to one
    tokens: Tensor | None  # [rows, n] int64; None: the whole vocabulary in its order
    neg_entropy: Tensor  # Σ p·log p over all rows
    temperature: float

    def divergence(self, log_q: Tensor) -> Tensor:
        """KL(these ‖ q), summed over rows. log_q: [rows, vocab_size], at this temperature."""
        seen = log_q if self.tokens is None else log_q.gather(-1, self.tokens)
        return self.neg_entropy - torch.dot(self.probabilities.flatten(), seen.flatten())

    def subtract_from(self, grad: Tensor, weight: float) -> None:
        """grad −= weight · p, in place. grad: [rows, vocab_size]."""
        if self.tokens is None:
            grad.sub_(self.probabilities, alpha=weight)
        else:
            grad.scatter_add_(-1, self.tokens, -weight * self.probabilities)


@torch.no_grad()
def soft_targets(teacher: Tensor, temperature: float = 1.0, top_n: int = 0) -> SoftTargets:
    """teacher: logits [rows, vocab_size]. With `top_n` its n most likely tokens, renormalised."""
    logits, tokens = _wide(teacher), None
    if top_n and top_n < logits.shape[-1]:
        logits, tokens = logits.topk(top_n, dim=-1)
    log_p = (logits if temperature == 1 else logits / temperature).log_softmax(dim=-1)
    p = log_p.exp()
    return SoftTargets(p, tokens, (p * log_p).sum(), temperature)


def exit_loss(
    logits: Tensor,
    labels: Tensor,
    data_weight: float = 1.0,
    targets: SoftTargets | None = None,
    target_weight: float = 0.0,
) -> Tensor:
    """data_weight · cross entropy + target_weight · T² · KL(targets ‖ logits), summed over rows.

    The divergence is taken at the targets' temperature T (Hinton et al., 2015). logits: [rows,
    vocab_size]; labels: [rows] int64. Computed in fp32 or wider. No gradient reaches the targets.
    """
    return _ExitLoss.apply(logits, labels, data_weight, targets, target_weight)


class _ExitLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        data_weight: float,
        targets: SoftTargets | None,
        target_weight: float,
    ) -> Tensor:
        wide = _wide(logits)
        log_q = softened = wide.log_softmax(dim=-1)
        loss = -data_weight * log_q.gather(-1, labels[:, None]).sum()
        pull = 0.0  # of the targets on the gradient: T² of the loss, 1/T of its inner derivative
        if targets is not None:
            temperature = targets.temperature
            if temperature != 1:
                softened = (wide / temperature).log_softmax(dim=-1)
            loss = loss + target_weight * temperature**2 * targets.divergence(softened)
            pull = target_weight * temperature
        if not ctx.needs_input_grad[0]:
            return loss
        if softened is log_q:
            grad = log_q.exp_().mul_(data_weight + pull)
        else:
            grad = log_q.exp_().mul_(data_weight).add_(softened.exp_(), alpha=pull)
        if targets is not None:
            targets.subtract_from(grad, pull)
        known = grad.new_full((len(labels), 1), -data_weight)
        grad.scatter_add_(-1, labels[:, None], known)
        ctx.save_for_backward(grad.to(logits.dtype))
        return loss

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = ctx.saved_tensors
        return (grad * upstream.to(grad.dtype), None, None, None, None)


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
    share = config.distill_weight
    taught = None
    if share > 0 and len(logits) > 1:
        taught = soft_targets(logits[-1], config.distill_temperature, config.distill_top_n)
    held = None if anchor is None else soft_targets(anchor)
    low = [exit_loss(x, labels, 1 - share, taught, share) for x in logits[:-1]]
    return torch.stack([*low, exit_loss(logits[-1], labels, 1.0, held, config.anchor_weight)])


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype is torch.float64 else logits.float()
