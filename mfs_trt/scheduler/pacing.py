"""Pacing: how much prompt work a step may take beside running decodes, in time rather than tokens.

While requests decode, a step with prompt rows may take `max_stretch` times as long as a decode step
of the whole model, or `max_step_s`: what does not fit is computed later.
"""

from mfs_trt.scheduler.step_cost import MIN_STEPS, StepCost, StepWork

MIN_ROWS = 8  # prompt rows that a step takes in any case: prompts must get on


class Pacing:
    """Raises nothing, decides nothing but seconds and rows."""

    def __init__(
        self, cost: StepCost, *, max_stretch: float = 1.6, max_step_s: float | None = None
    ) -> None:
        """`max_step_s`: an absolute target in place of the relative one."""
        self.cost = cost
        self._max_stretch, self._max_step_s = max_stretch, max_step_s

    def spare_seconds(self, decodes: StepWork) -> float | None:
        """Left for prompts beside `decodes`; None: no limit.

        Without decodes nobody waits for the step, and before some steps were seen nothing is known.
        """
        if not any(decodes.rows) or self.cost.num_steps < MIN_STEPS:
            return None
        whole = StepWork([max(1, n) for n in decodes.rows], decodes.pairs, decodes.contexts)
        base = self.cost.predict(whole)
        return max(0.0, (self._max_step_s or base * self._max_stretch) - base)
