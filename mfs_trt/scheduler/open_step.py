"""OpenStep: a step while it is decided: who runs, and what is left of the budget."""

from dataclasses import dataclass, field

from mfs_trt.scheduler.plan import Plan


@dataclass
class OpenStep:
    rows_left: list[int]  # of the budget, per segment
    plans: dict[str, Plan] = field(default_factory=dict)  # by request id
    preempted: list[str] = field(default_factory=list)  # request ids
    levels: dict[str, int] = field(default_factory=dict)  # of requests, where some draft
    is_paced: bool = False  # decodes are planned, and what they leave is known
    spare_s: float | None = None  # seconds left for prompts; None: no limit
    has_prompt: bool = False

    def take(self, plan: Plan) -> None:
        for segment, (first, last) in enumerate(zip(plan.first, plan.last, strict=True)):
            self.rows_left[segment] -= last - first
        self.plans[plan.request.request_id] = plan

    def preempt(self, request_id: str) -> None:
        """The request does not run after all: its rows are free for others."""
        plan = self.plans.pop(request_id, None)
        if plan is not None:
            for segment, (first, last) in enumerate(zip(plan.first, plan.last, strict=True)):
                self.rows_left[segment] += last - first
        self.preempted.append(request_id)
