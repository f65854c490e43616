"""Pacing: how many prompt rows a step may take beside running decodes, in time rather than tokens.

The cost of a step is learnt as it goes: t ≈ c + Σ over segments (a · [has rows] + b · rows), by
recursive least squares that forget slowly. While requests decode, a step with prompt rows may take
`max_stretch` times as long as one without, or `max_step_s`: what does not fit is computed later.
"""

from collections.abc import Sequence

import numpy as np

FORGETTING = 0.98  # weight of a step after the next one
MIN_ROWS = 8  # prompt rows that a step takes in any case: prompts must get on
MIN_STEPS = 8  # observed before the model is believed


class StepCost:
    """Seconds of a step, from its rows per segment."""

    def __init__(self, num_segments: int) -> None:
        self.num_steps = 0
        self._num_segments = num_segments
        size = 1 + 2 * num_segments
        self._weights = np.zeros(size)
        self._spread = np.eye(size) * 1e2  # how little is known yet; rows are in hundreds

    def observe(self, rows: Sequence[int], seconds: float) -> None:
        x = self._features(rows)
        gain = self._spread @ x
        gain /= FORGETTING + x @ gain
        self._weights += gain * (seconds - x @ self._weights)
        spread = (self._spread - np.outer(gain, x @ self._spread)) / FORGETTING
        self._spread = np.minimum(spread, 1e6)  # directions that no step shows would grow for ever
        self.num_steps += 1

    def predict(self, rows: Sequence[int]) -> float:
        return max(0.0, float(self._features(rows) @ self._weights))

    def seconds_per_row(self) -> float:
        """Of a row that runs through all segments, beside others."""
        return max(1e-9, float(self._weights[1 + self._num_segments :].sum()) / 100)

    def _features(self, rows: Sequence[int]) -> np.ndarray:
        counts = np.asarray(rows, float)
        return np.concatenate(([1.0], counts > 0, counts / 100))


class Pacing:
    """Raises nothing, decides nothing but a number of rows."""

    def __init__(
        self, num_segments: int, *, max_stretch: float = 1.8, max_step_s: float | None = None
    ) -> None:
        """`max_step_s`: an absolute target in place of the relative one."""
        self.cost = StepCost(num_segments)
        self._max_stretch, self._max_step_s = max_stretch, max_step_s

    def prompt_rows(self, decode_rows: Sequence[int]) -> int | None:
        """Prompt rows that fit beside `decode_rows` per segment; None: no limit.

        Without decodes nobody waits for the step, and before some steps were seen nothing is known.
        """
        if not any(decode_rows) or self.cost.num_steps < MIN_STEPS:
            return None
        base = self.cost.predict(decode_rows)
        target = self._max_step_s or base * self._max_stretch
        spare = target - base
        return max(MIN_ROWS, int(spare / self.cost.seconds_per_row()))
