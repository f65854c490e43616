"""Pacing: how much prompt work a step may take beside running decodes, in time rather than tokens.

While requests decode, a step with prompt rows may take `max_stretch` times as long as a decode step
of the whole model, or `max_step_s`: what does not fit is computed later. Where more requests wait
for their first token than decode, as in a burst, prompts get more by that ratio, up to
`MAX_PREFERENCE` times: few tokens come later then, and many come sooner.
"""

from mfs_trt.scheduler.step_cost import MIN_STEPS, StepCost, StepWork

MIN_ROWS = 8  # prompt rows that a step takes in any case: prompts must get on
MAX_PREFERENCE = 5.0


class Pacing:
    """Raises nothing, decides nothing but seconds and rows."""

    def __init__(
        self, cost: StepCost, *, max_stretch: float = 1.6, max_step_s: float | None = None
    ) -> None:
        """`max_step_s`: an absolute target in place of the relative one."""
        self.cost = cost
        self._max_stretch, self._max_step_s = max_stretch, max_step_s

    def spare_seconds(self, decodes: StepWork, num_decodes: int, num_prompts: int) -> float | None:
        """Left for prompts beside `decodes`, the work of `num_decodes` requests; None: no limit.

        `num_prompts`: requests that could come nearer to their first token in this step. Without
        decodes nobody waits for the step, and before some steps were seen nothing is known.
        """
        if not any(decodes.rows) or self.cost.num_steps < MIN_STEPS:
            return None
        whole = StepWork([max(1, n) for n in decodes.rows], decodes.pairs, decodes.contexts)
        base = self.cost.predict(whole)
        if self._max_step_s is not None:
            return max(0.0, self._max_step_s - base)
        preference = min(max(1.0, num_prompts / num_decodes), MAX_PREFERENCE)
        return base * (self._max_stretch - 1) * preference
