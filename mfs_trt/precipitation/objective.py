"""The joint objective L0 + λ1·L1 + … as one module: a nested model and its exits' losses."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mfs_trt.model.sequences import boundaries
from mfs_trt.model.transformer import NestedModel
from mfs_trt.precipitation.chunked import chunked_losses
from mfs_trt.precipitation.config import PrecipitationConfig
from mfs_trt.precipitation.losses import exit_losses
from mfs_trt.precipitation.packing import IGNORED

_PLAIN = PrecipitationConfig()  # its losses are cross entropy at every exit


class JointObjective(nn.Module):
    """One module, so that data parallelism and sharding see every parameter in one forward pass."""

    def __init__(
        self,
        model: NestedModel,
        config: PrecipitationConfig,
        anchor: NestedModel | None = None,
    ) -> None:
        """`anchor`: the model that training starts from, frozen; wanted when `anchor_weight` > 0.

        It is kept outside the module's own parameters.
        """
        super().__init__()
        self.model, self.config = model, config
        self._anchor = (anchor,)

    def forward(
        self, input_ids: Tensor, labels: Tensor, tier_weights: Sequence[float]
    ) -> tuple[Tensor, Tensor]:
        """Σ λ·L with its gradient, and L of every tier [num_tiers], detached; sums over tokens.

        input_ids, labels: [sequences, length] int64; labels of -100 are left out. The loss of
        a tier with λ = 0 is not taken: nan. In evaluation mode L is plain cross entropy.
        """
        config = self.config if self.training else _PLAIN
        model = self.model
        num_tiers = len(model.family.tiers)
        trained = [t for t in range(num_tiers) if tier_weights[t] > 0]
        above = boundaries(
            model,
            input_ids,
            trained[-1],
            recompute_layers=config.recompute_layers and self.training,
        )
        kept = (labels != IGNORED).flatten()
        rows = labels.flatten()[kept]
        hidden = [above[t].flatten(0, 1)[kept] for t in trained]
        anchor = self._anchor[0]
        anchor_hidden = None
        if anchor is not None and config.anchor_weight > 0:
            with torch.no_grad():
                anchor_hidden = boundaries(anchor, input_ids)[-1].flatten(0, 1)[kept]

        def losses_of(chunk: Sequence[Tensor], first: int, last: int) -> Tensor:
            logits = [model.exit_logits(t, x) for t, x in zip(trained, chunk, strict=True)]
            target = None
            if anchor is not None and anchor_hidden is not None:
                with torch.no_grad():
                    target = anchor.exit_logits(num_tiers - 1, anchor_hidden[first:last])
            return exit_losses(config, logits, rows[first:last], target)

        exits = [model.exits[str(model.family.tiers[t].exit_layer)] for t in trained]
        parameters = list({id(p): p for e in exits for p in e.parameters()}.values())
        total, losses = chunked_losses(
            losses_of, hidden, [tier_weights[t] for t in trained], parameters, config.loss_rows
        )
        by_tier = losses.new_full((num_tiers,), torch.nan)
        by_tier[trained] = losses
        return total, by_tier


def num_trained_tokens(labels: Tensor) -> int:
    return int((labels != IGNORED).sum())
