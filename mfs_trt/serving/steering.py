"""Steering: between steps, asks the policy of each request that has one, and switches its tier.

The policies themselves are pure (`scheduler.policies`); here is what they look at over time. Where
no request has a policy, a step costs one question.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from mfs_trt.request import Request
from mfs_trt.sampling.sampler import log_prob
from mfs_trt.scheduler.finish_time import decode_work, seconds_by_tier
from mfs_trt.scheduler.pacing import MIN_ROWS, Pacing
from mfs_trt.scheduler.policies import (
    WINDOW,
    CascadeView,
    DeadlineView,
    LoadView,
    cascade_tier,
    deadline_tier,
    is_calm,
    is_pressed,
    load_level,
    load_tier,
)
from mfs_trt.scheduler.scheduler import Scheduler
from mfs_trt.scheduler.step_cost import MIN_STEPS
from mfs_trt.scheduler.tier_policy import CASCADE, DEADLINE, EXPLICIT, LOAD, TierPolicy
from mfs_trt.serving.decisions import Decision

REVIEW_EVERY = 8  # steps between two looks at a deadline

SwitchCounter = Counter[tuple[str, str]]  # (policy, "up" or "down") → switches


@dataclass
class _Steered:
    """A request that its policy may move."""

    request: Request
    policy: TierPolicy
    log_probs: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))  # at its tier
    num_steps_unseen: int = 0  # since its deadline was looked at


@dataclass
class _Load:
    """How long the queue has been what it is."""

    level: int = 0  # tiers given up
    num_steps_at_level: int = 10**9
    num_pressed_steps: int = 0
    num_calm_steps: int = 0


class Steering:
    """Of one scheduler's requests. It reads no clock: the core tells the time."""

    def __init__(
        self, scheduler: Scheduler, pacing: Pacing | None, num_switches: SwitchCounter
    ) -> None:
        """`pacing` None predicts nothing: what has a deadline stays where it is. `num_switches` is
        counted up.
        """
        self._scheduler = scheduler
        self._pacing = pacing
        self._num_switches = num_switches
        self._steered: dict[str, _Steered] = {}
        self._load = _Load()

    def add(self, request: Request, policy: TierPolicy, now_s: float) -> None:
        """Steer a queued request from now on; it may start at another tier at once."""
        if policy.name == EXPLICIT:
            return
        if policy.name == LOAD and not self._with_policy(LOAD):
            self._load = _Load()  # nobody has watched the queue
        steered = self._steered[request.request_id] = _Steered(request, policy)
        if policy.name == LOAD:
            self._move(steered, load_tier(self._load.level, policy.low, policy.high))
        elif policy.name == DEADLINE:
            self._review_deadline(steered, now_s)

    def switch(self, request: Request, tier: int) -> None:
        """The caller has its say: the request goes to `tier`, and its policy is over.

        Raises `RequestTooLargeError` as the scheduler does, and then changes nothing.
        """
        if tier != request.tier:
            self._switch(request, tier, EXPLICIT)
        self._steered.pop(request.request_id, None)

    def after_step(self, decisions: Sequence[Decision], now_s: float) -> None:
        """Ask the policies; `decisions` are those of the step that just ran."""
        if not self._steered:
            return
        for request_id in [k for k, s in self._steered.items() if s.request.is_finished]:
            del self._steered[request_id]
        self._follow_cascades(decisions)
        self._follow_load()
        for steered in self._with_policy(DEADLINE):
            steered.num_steps_unseen += 1
            if steered.num_steps_unseen >= REVIEW_EVERY:
                self._review_deadline(steered, now_s)

    def _with_policy(self, name: str) -> list[_Steered]:
        steered = self._steered.values()
        return [s for s in steered if s.policy.name == name and not s.request.is_finished]

    def _move(self, steered: _Steered, tier: int) -> None:
        if tier != steered.request.tier:
            self._switch(steered.request, tier, steered.policy.name)
            steered.log_probs.clear()

    def _switch(self, request: Request, tier: int, policy: str) -> None:
        direction = "up" if tier > request.tier else "down"
        self._scheduler.switch(request, tier)
        self._num_switches[policy, direction] += 1

    # -- one policy each -------------------------------------------------------------------------

    def _follow_cascades(self, decisions: Sequence[Decision]) -> None:
        for decision in decisions:
            steered = self._steered.get(decision.request.request_id)
            if steered is None or steered.policy.name != CASCADE or not decision.is_final:
                continue
            pairs = zip(decision.logits, decision.token_ids, strict=True)
            steered.log_probs += decision.log_probs or [log_prob(row, t) for row, t in pairs]
            view = CascadeView(
                steered.request.tier,
                steered.policy.high,
                tuple(steered.log_probs),
                steered.policy.cascade_threshold,
            )
            self._move(steered, cascade_tier(view))

    def _follow_load(self) -> None:
        """Requests that climb do so one by one, a step apart: each has tokens to catch up with."""
        watching = self._with_policy(LOAD)
        if not watching:
            return
        load = self._load
        queue = len(self._scheduler.waiting), len(self._scheduler.running)
        load.num_pressed_steps = load.num_pressed_steps + 1 if is_pressed(*queue) else 0
        load.num_calm_steps = load.num_calm_steps + 1 if is_calm(*queue) else 0
        load.num_steps_at_level += 1
        level = load_level(
            LoadView(
                level=load.level,
                highest_level=max(s.policy.high - s.policy.low for s in watching),
                num_steps_at_level=load.num_steps_at_level,
                num_pressed_steps=load.num_pressed_steps,
                num_calm_steps=load.num_calm_steps,
            )
        )
        if level != load.level:
            load.level, load.num_steps_at_level = level, 0
        has_climbed = False
        for steered in watching:
            tier = load_tier(level, steered.policy.low, steered.policy.high)
            if tier > steered.request.tier:
                if has_climbed:
                    continue
                has_climbed = True
            self._move(steered, tier)

    def _review_deadline(self, steered: _Steered, now_s: float) -> None:
        steered.num_steps_unseen = 0
        request, pacing = steered.request, self._pacing
        if pacing is None or pacing.cost.num_steps < MIN_STEPS:
            steered.num_steps_unseen = REVIEW_EVERY  # again after the next step
            return
        assert request.deadline_time_s is not None
        running = [r for r in self._scheduler.running if r is not request]
        beside = decode_work([(r.tier, r.num_final_tokens) for r in running], pacing.cost.groups)
        budget = self._scheduler.limits.max_num_batched_tokens
        spare_s = pacing.spare_seconds(beside, len(running), 1)
        if spare_s is not None:
            rows = pacing.cost.rows_within(spare_s, request.num_final_tokens)
            budget = min(budget, max(MIN_ROWS, rows))
        view = DeadlineView(
            tier=request.tier,
            low=steered.policy.low,
            high=steered.policy.high,
            seconds_left=request.deadline_time_s - now_s,
            seconds_by_tier=seconds_by_tier(
                counts=request.num_computed_tokens,
                num_tokens=request.num_final_tokens,
                tokens_left=request.max_num_tokens - request.num_final_tokens,
                beside=beside,
                rows_per_step=budget,
                cost=pacing.cost,
            ),
        )
        self._move(steered, deadline_tier(view))
