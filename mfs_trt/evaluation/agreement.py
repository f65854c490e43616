"""How well a lower tier drafts for a higher one, over held-out positions."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from mfs_trt.family.spec import FamilySpec

_LOGITS_AT_A_TIME = 1 << 24  # per tier, while probabilities of all tiers are held


@dataclass(frozen=True)
class PairAgreement:
    """Tier `draft` against tier `target`, both having seen the same text."""

    draft: str
    target: str
    greedy_agreement: float  # share of positions with the same most likely token
    acceptance: float  # mean of Σ min(p_draft, p_target): chance that a sampled draft token stands


class AgreementMeter:
    """Sums agreement over chunks of positions, for every pair of tiers.

    A draft token is accepted with probability min(1, p_target / p_draft), which comes to
    Σ min(p_draft, p_target) over the draft's choices (Leviathan et al., 2023).
    """

    def __init__(self, family: FamilySpec, pairs: Sequence[tuple[int, int]] | None = None) -> None:
        """`pairs`: (draft, target) tier indices; every lower tier with every higher by default."""
        self._family = family
        self._pairs = list(pairs or combinations(range(len(family.tiers)), 2))
        self._same = dict.fromkeys(self._pairs, 0)
        self._shared = dict.fromkeys(self._pairs, 0.0)
        self._count = 0

    def add(self, logits: Sequence[Tensor]) -> None:
        """logits: per tier [rows, vocab_size]."""
        num_rows, vocab_size = logits[0].shape
        step = max(1, _LOGITS_AT_A_TIME // vocab_size)
        for first in range(0, num_rows, step):
            self._add_rows([tier[first : first + step] for tier in logits])
        self._count += num_rows

    def _add_rows(self, logits: Sequence[Tensor]) -> None:
        tops = [tier.argmax(-1) for tier in logits]
        probabilities = [tier.softmax(-1) for tier in logits]
        for draft, target in self._pairs:
            self._same[draft, target] += int((tops[draft] == tops[target]).sum())
            shared = torch.minimum(probabilities[draft], probabilities[target]).sum(-1)
            self._shared[draft, target] += float(shared.double().sum())

    def result(self) -> tuple[PairAgreement, ...]:
        """One row a pair. At least one chunk must have been added, where there are pairs."""
        assert self._count or not self._pairs, "no position was added"
        names = [tier.name for tier in self._family.tiers]
        return tuple(
            PairAgreement(
                names[draft],
                names[target],
                self._same[draft, target] / self._count,
                self._shared[draft, target] / self._count,
            )
            for draft, target in self._pairs
        )
