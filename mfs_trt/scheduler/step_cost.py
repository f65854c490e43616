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

FORGETTING = 0.98  # weight of a step after the next one
MIN_STEPS = 8  # observed before the model is believed
MAX_SURPRISE = 0.5  # of the prediction: what a step that was interrupted may teach
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
    _usual_s: float = 0.0  # a step of late
    _weights: list[float] = field(init=False)
    _spread: np.ndarray = field(init=False)  # how little is known yet

    def __post_init__(self) -> None:
        size = 3 + 2 * len(self.groups)
        self._weights = [0.0] * size
        self._spread = np.eye(size) * 1e2

    def observe(self, work: StepWork, seconds: float) -> None:
        x = np.array(self._features(work))
        gain = self._spread @ x
        gain /= FORGETTING + x @ gain
        expected = self.predict(work)
        surprise = seconds - float(x @ self._weights)
        if self.num_steps >= MIN_STEPS:
            most = MAX_SURPRISE * max(expected, 0.1 * self._usual_s)
            surprise = min(max(surprise, -most), most)
            seconds = min(seconds, expected + most)
        self._usual_s += (seconds - self._usual_s) / min(self.num_steps + 1, 20)
        self._weights = (self._weights + gain * surprise).tolist()
        spread = (self._spread - np.outer(gain, x @ self._spread)) / FORGETTING
        self._spread = np.minimum(spread, 1e6)  # directions that no step shows would grow for ever
        self.num_steps += 1

    def predict(self, work: StepWork) -> float:
        """Seconds."""
        features = self._features(work)
        return max(0.0, sum(w * x for w, x in zip(self._weights, features, strict=True)))

    def row_seconds(self, num_rows: int, context: int) -> float:
        """Of the next `num_rows` tokens of a request with `context` tokens, in all segments."""
        linear, quadratic = self._row_costs(context)
        return num_rows * (linear + quadratic * num_rows)

    def rows_within(self, seconds: float, context: int) -> int:
        """The most rows with `row_seconds` up to `seconds`."""
        linear, quadratic = self._row_costs(context)
        if seconds <= 0:
            return 0
        # num_rows · (linear + quadratic · num_rows) = seconds, in a form that quadratic = 0 bears
        root = (linear * linear + 4 * quadratic * seconds) ** 0.5
        return int(2 * seconds / (linear + root))

    def _row_costs(self, context: int) -> tuple[float, float]:
        num_segments = len(self.groups)
        rows = sum(self._weights[1 + num_segments : 1 + 2 * num_segments]) / _ROWS
        pair = max(0.0, self._weights[-2]) * sum(self.groups) / _PAIRS
        return max(1e-9, rows) + pair * context, pair / 2

    def _features(self, work: StepWork) -> list[float]:
        has_rows = [float(n > 0) for n in work.rows]
        rows = [n / _ROWS for n in work.rows]
        return [1.0, *has_rows, *rows, work.pairs / _PAIRS, work.contexts / _CONTEXTS]
