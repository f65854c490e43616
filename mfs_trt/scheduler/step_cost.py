"""StepCost: seconds of a step, learnt as steps go by.

t ≈ c + Σ over segments (a · [has rows] + b · rows) + p · pairs + r · contexts, by recursive least
squares that forget slowly. Pairs are products of a row with a token of its context (arithmetic of
attention), contexts the tokens whose keys and values a request's rows read (memory).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from mfs_trt.scheduler.output import SegmentItems
from mfs_trt.scheduler.plan import Plan

FORGETTING = 0.95  # weight of a step after the next one
MIN_STEPS = 8  # observed before the model is believed
# Rows in hundreds and so on, so that all unknowns are of one size.
_ROWS, _PAIRS, _CONTEXTS = 100.0, 1e5, 1e4


@dataclass
class StepWork:
    """What a step computes. `pairs` and `contexts` count each layer group of a segment."""

    rows: list[int]  # per segment
    pairs: float = 0.0
    contexts: float = 0.0

    def add(self, segment: int, first: int, last: int, groups: int, times: float = 1) -> None:
        """Tokens `[first, last)` of `times` requests in a segment of `groups` layer groups."""
        self.rows[segment] += round(times * (last - first))
        self.pairs += times * groups * (last - first) * (first + last + 1) / 2
        self.contexts += times * groups * last


def work_of_plans(plans: Iterable[Plan], groups: Sequence[int]) -> StepWork:
    work = StepWork([0] * len(groups))
    for plan in plans:
        for s, (first, last) in enumerate(zip(plan.first, plan.last, strict=True)):
            if last > first:
                work.add(s, first, last, groups[s])
    return work


def work_of_step(segments: Sequence[SegmentItems | None], groups: Sequence[int]) -> StepWork:
    work = StepWork([0] * len(groups))
    for s, items in enumerate(segments):
        if items is None:
            continue
        first, last = items.first_tokens.astype(np.int64), items.last_tokens.astype(np.int64)
        work.rows[s] = int((last - first).sum())
        work.pairs += groups[s] * float(((last - first) * (first + last + 1)).sum()) / 2
        work.contexts += groups[s] * float(last.sum())
    return work


@dataclass
class StepCost:
    """`groups`: layer groups of each segment."""

    groups: Sequence[int]
    num_steps: int = 0
    _weights: list[float] = field(init=False)
    _spread: np.ndarray = field(init=False)  # how little is known yet

    def __post_init__(self) -> None:
        size = 3 + 2 * len(self.groups)
        self._weights = [0.0] * size
        self._spread = np.eye(size)

    def observe(self, work: StepWork, seconds: float) -> None:
        """Errors count relative to the step's own time: long steps must not drown short ones, and
        one that was interrupted says little.

        Old steps are forgotten only in the direction in which the new one teaches (Kulhavý 1987):
        what no step shows for a long time stays known, and its uncertainty bounded.
        """
        if seconds <= 0:
            return
        x = np.array(self._features(work)) / seconds
        towards = self._spread @ x
        doubt = float(x @ towards)
        error = 1 - float(x @ self._weights)
        self._weights = (self._weights + towards * (error / (1 + doubt))).tolist()
        if doubt > 0:
            kept = FORGETTING - (1 - FORGETTING) / doubt
            if kept:
                self._spread -= np.outer(towards, towards) / (1 / kept + doubt)
        self.num_steps += 1

    def predict(self, work: StepWork) -> float:
        """Seconds."""
        features = self._features(work)
        return max(0.0, sum(w * x for w, x in zip(self._weights, features, strict=True)))

    def row_seconds(self, num_rows: int, context: int) -> float:
        """Of the next `num_rows` tokens of a request with `context` tokens, in all segments."""
        fixed, linear, quadratic = self._row_costs(context)
        return fixed + num_rows * (linear + quadratic * num_rows)

    def rows_within(self, seconds: float, context: int) -> int:
        """The most rows with `row_seconds` up to `seconds`."""
        fixed, linear, quadratic = self._row_costs(context)
        spare = seconds - fixed
        if spare <= 0:
            return 0
        # num_rows · (linear + quadratic · num_rows) = spare, in a form that quadratic = 0 bears
        root = (linear * linear + 4 * quadratic * spare) ** 0.5
        return int(2 * spare / (linear + root))

    def _row_costs(self, context: int) -> tuple[float, float, float]:
        """Seconds as a polynomial of the number of rows; 0 rows cost nothing all the same."""
        num_segments, groups = len(self.groups), sum(self.groups)
        row = sum(self._weights[1 + num_segments : 1 + 2 * num_segments]) / _ROWS
        pair, read = (max(0.0, w) * groups for w in self._weights[-2:])
        pair, read = pair / _PAIRS, read / _CONTEXTS
        return read * context, max(1e-9, row) + read + pair * context, pair / 2

    def _features(self, work: StepWork) -> list[float]:
        has_rows = [float(n > 0) for n in work.rows]
        rows = [n / _ROWS for n in work.rows]
        return [1.0, *has_rows, *rows, work.pairs / _PAIRS, work.contexts / _CONTEXTS]
