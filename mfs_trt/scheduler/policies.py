"""Tier policies: which tier a request goes on at. Pure functions of a frozen view of the situation.

None ever leaves `[low, high]`. There is no function for `explicit`: such a request moves when
`switch_tier` says so.
"""

from collections.abc import Sequence
from dataclasses import dataclass

STAY_RESERVE = 1.1  # a predicted finish times this must meet the deadline
CLIMB_RESERVE = 1.3  # the same for a tier above the present one: predictions waver

DEGRADE_AT = 0.25  # waiting requests per running one
CLIMB_AT = 0.05
PRESSED_STEPS = 4  # in a row at `DEGRADE_AT` or above until a tier is given up
CALM_STEPS = 32  # in a row at `CLIMB_AT` or below until one is taken back
MIN_DWELL = 16  # steps at a level

WINDOW = 16  # tokens whose log-probabilities are averaged
MIN_TOKENS = 8  # made at a tier before it is judged


@dataclass(frozen=True)
class DeadlineView:
    """A request with a deadline. Tiers are indices."""

    tier: int  # it runs at
    low: int
    high: int
    seconds_left: float  # until the deadline
    seconds_by_tier: Sequence[float]  # predicted until its last token, of each tier up to `high`


def deadline_tier(view: DeadlineView) -> int:
    """The highest tier whose predicted finish meets the deadline; the lowest where none does."""
    for tier in range(view.high, view.low, -1):
        reserve = CLIMB_RESERVE if tier > view.tier else STAY_RESERVE
        if view.seconds_by_tier[tier] * reserve <= view.seconds_left:
            return tier
    return view.low


@dataclass(frozen=True)
class LoadView:
    """A server under load; a *level* is a number of tiers given up."""

    level: int
    highest_level: int
    num_steps_at_level: int
    num_pressed_steps: int  # in a row, the last one included
    num_calm_steps: int


def is_pressed(num_waiting: int, num_running: int) -> bool:
    """Whether the queue is long: by Little's law, waiting requests per running one is the wait
    of a new request in units of a request's own stay.
    """
    return num_waiting >= DEGRADE_AT * max(1, num_running)


def is_calm(num_waiting: int, num_running: int) -> bool:
    return num_waiting <= CLIMB_AT * num_running


def load_level(view: LoadView) -> int:
    """One level more while the queue stays long, one less when it has long been short."""
    if view.num_steps_at_level < MIN_DWELL:
        return view.level
    if view.num_pressed_steps >= PRESSED_STEPS:
        return min(view.level + 1, view.highest_level)
    if view.num_calm_steps >= CALM_STEPS:
        return max(view.level - 1, 0)
    return view.level


def load_tier(level: int, low: int, high: int) -> int:
    """The tier of a request with these bounds when the server has given up `level` tiers."""
    return max(low, high - level)


@dataclass(frozen=True)
class CascadeView:
    """A request that began low."""

    tier: int  # it runs at
    high: int
    log_probs: Sequence[float]  # of the tokens made at this tier, natural logarithm, oldest first
    threshold: float


def cascade_tier(view: CascadeView) -> int:
    """One tier up when the mean log-probability of the last tokens is under the threshold."""
    if view.tier >= view.high or len(view.log_probs) < MIN_TOKENS:
        return view.tier
    window = view.log_probs[-WINDOW:]
    return view.tier + (sum(window) / len(window) < view.threshold)
