"""Held-out loss of each tier, added up chunk by chunk."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from mfs_trt.family.spec import FamilySpec

_MAX_EXPONENT = 709.0  # of exp in double precision


@dataclass(frozen=True)
class TierLoss:
    """Cross entropy of one tier, in nats per token."""

    tier: str
    exit_layer: int
    loss: float
    standard_error: float  # of the mean, over tokens taken as independent
    num_tokens: int

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < _MAX_EXPONENT else math.inf


class LossMeter:
    """Sums the tiers' losses over chunks of positions."""

    def __init__(self, family: FamilySpec) -> None:
        self._family = family
        self._sums = [0.0] * len(family.tiers)
        self._squares = [0.0] * len(family.tiers)
        self.num_tokens = 0

    def add(self, logits: Sequence[Tensor], labels: Tensor) -> None:
        """logits: per tier [rows, vocab_size]; labels: [rows] int64."""
        for i, tier in enumerate(logits):
            losses = F.cross_entropy(tier, labels, reduction="none").double()
            self._sums[i] += float(losses.sum())
            self._squares[i] += float(losses.square().sum())
        self.num_tokens += len(labels)

    def result(self) -> tuple[TierLoss, ...]:
        """One row a tier, shallow to deep. At least one chunk must have been added."""
        assert self.num_tokens, "no position was added"
        rows = []
        for tier, total, squares in zip(self._family.tiers, self._sums, self._squares, strict=True):
            mean = total / self.num_tokens
            variance = max(0.0, squares / self.num_tokens - mean**2)
            error = math.sqrt(variance / self.num_tokens)
            rows.append(TierLoss(tier.name, tier.exit_layer, mean, error, self.num_tokens))
        return tuple(rows)
