"""λ from gradient norms: every tier pulls equally hard on the layers that all of them share."""

import torch
from torch import Tensor

from mfs_trt.precipitation.objective import JointObjective
from mfs_trt.precipitation.world import World

_KEPT = 0.5  # of the factor measured before


def tier_balances(
    objective: JointObjective,
    input_ids: Tensor,
    labels: Tensor,
    lowest_tier: int,
    world: World,
    previous: list[float],
) -> list[float]:
    """Factor of each tier's λ: ‖∇L_top‖ / ‖∇L_tier‖ over the layers below the lowest exit.

    Half of the change is taken at a time. Costs one forward and one backward pass per trained tier.
    """
    family = objective.model.family
    shared = [
        p
        for layer in objective.model.layers[: family.tiers[lowest_tier].exit_layer]
        for p in layer.parameters()
        if p.requires_grad
    ]
    num_tiers = len(family.tiers)
    norms = torch.zeros(num_tiers, device=input_ids.device)
    for tier in range(lowest_tier, num_tiers):
        # The top tier always takes part; its share of a low tier's loss is made negligible.
        weights = [0.0] * num_tiers
        weights[-1] = 1e-12
        weights[tier] = 1.0
        total, _ = objective(input_ids, labels, weights)
        grads = torch.autograd.grad(total, shared, allow_unused=True)
        norms[tier] = torch.stack([g.float().norm() for g in grads if g is not None]).norm()
    world.sum(norms)
    balances = list(previous)
    for tier in range(lowest_tier, num_tiers - 1):
        wanted = float(norms[-1] / norms[tier].clamp_min(1e-12))
        balances[tier] = _KEPT * previous[tier] + (1 - _KEPT) * wanted
    return balances
