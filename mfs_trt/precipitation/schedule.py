"""What each training step trains: stages from high tiers to low, learning rate, λ. All pure."""

from dataclasses import dataclass
from math import cos, pi

from mfs_trt.precipitation.config import PrecipitationConfig


@dataclass(frozen=True)
class Stage:
    """Steps `[first_step, last_step)` with losses at the tiers from `lowest_tier` to the top."""

    first_step: int
    last_step: int
    lowest_tier: int

    @property
    def num_steps(self) -> int:
        return self.last_step - self.first_step


def stages(schedule: str, num_tiers: int, num_steps: int) -> tuple[Stage, ...]:
    """Stepwise: num_tiers - 1 stages, each adding the next lower tier; joint: one with all.

    Stages are of equal length up to one step.
    """
    if schedule == "joint" or num_tiers < 3:
        return (Stage(0, num_steps, 0),)
    count = num_tiers - 1
    borders = [i * num_steps // count for i in range(count + 1)]
    return tuple(
        Stage(a, b, lowest_tier=num_tiers - 2 - i)
        for i, (a, b) in enumerate(zip(borders, borders[1:], strict=False))
    )


def stage_at(all_stages: tuple[Stage, ...], step: int) -> Stage:
    return next(s for s in all_stages if s.first_step <= step < s.last_step)


def learning_rate(config: PrecipitationConfig, stage: Stage, step: int) -> float:
    """Linear warm-up, then half a cosine down to 0 at the end of the stage."""
    done = step - stage.first_step
    if done < config.warmup_steps:
        return config.learning_rate * (done + 1) / config.warmup_steps
    span = max(1, stage.num_steps - config.warmup_steps)
    return config.learning_rate * 0.5 * (1 + cos(pi * (done - config.warmup_steps) / span))


def tier_weights(
    config: PrecipitationConfig, stage: Stage, step: int, num_tiers: int, balances: list[float]
) -> list[float]:
    """λ of every tier at this step; the top tier's is 1, that of tiers not yet trained 0.

    `balances`: factor of each tier, from measured gradient norms; used with `gradient_norm` only.
    With `ramp`, the tier that the stage adds grows from 0 (in a joint stage: all low tiers).
    """
    weights = [0.0] * num_tiers
    weights[-1] = 1.0
    grown = (step - stage.first_step + 1) / stage.num_steps
    is_joint = stage.first_step == 0 and stage.lowest_tier == 0
    for tier in range(stage.lowest_tier, num_tiers - 1):
        weights[tier] = config.tier_weight
        if config.balance == "gradient_norm":
            weights[tier] *= balances[tier]
        if config.balance == "ramp" and (tier == stage.lowest_tier or is_joint):
            weights[tier] *= grown
    return weights
