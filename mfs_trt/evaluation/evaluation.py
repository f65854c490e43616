"""Evaluation: one pass over held-out data → losses of tiers and agreement of pairs, by name."""

from collections.abc import Sequence
from dataclasses import dataclass

from mfs_trt.errors import ConfigError
from mfs_trt.evaluation.agreement import AgreementMeter, PairAgreement
from mfs_trt.evaluation.held_out import tier_logits
from mfs_trt.evaluation.perplexity import LossMeter, TierLoss
from mfs_trt.model.transformer import NestedModel
from mfs_trt.precipitation.packing import PackedTokens


@dataclass(frozen=True)
class Evaluation:
    """What was measured, shallow to deep."""

    losses: tuple[TierLoss, ...]
    pairs: tuple[PairAgreement, ...]

    def metrics(self) -> dict[str, float]:
        """Every figure by name: `loss.small`, `perplexity.small`, `agreement.small.large`,
        `acceptance.small.large`.
        """
        found = {f"loss.{tier.tier}": tier.loss for tier in self.losses}
        found |= {f"perplexity.{tier.tier}": tier.perplexity for tier in self.losses}
        for pair in self.pairs:
            found[f"agreement.{pair.draft}.{pair.target}"] = pair.greedy_agreement
            found[f"acceptance.{pair.draft}.{pair.target}"] = pair.acceptance
        return found


def evaluate_model(
    model: NestedModel,
    tokens: PackedTokens,
    *,
    pairs: Sequence[tuple[int, int]] | None = None,
    max_sequences: int | None = None,
    batch_size: int = 4,
) -> Evaluation:
    """Losses of all tiers, and agreement of `pairs` of tier indices (all by default).

    Raises `ConfigError` when the data holds no token that a loss is taken on.
    """
    losses, agreement = LossMeter(model.family), AgreementMeter(model.family, pairs)
    for logits, labels in tier_logits(
        model, tokens, max_sequences=max_sequences, batch_size=batch_size
    ):
        losses.add(logits, labels)
        agreement.add(logits)
    if not losses.num_tokens:
        raise ConfigError("held-out data: expected tokens that a loss is taken on, got none")
    return Evaluation(losses.result(), agreement.result())
