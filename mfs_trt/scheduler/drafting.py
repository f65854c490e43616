"""Drafting: how many tokens each level drafts before the next one verifies, chosen by what it pays.

A round of γ drafts and a verification gives (1 - α^(γ+1)) / (1 - α) tokens (Leviathan et al. 2023)
for γ draft passes and one pass of γ + 1 rows. α is estimated per request, the passes' seconds come
from the step cost model with everything that runs beside them, so that γ falls to 0 where drafting
would not pay: where others need deep steps anyway, or drafts seldom stand.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from mfs_trt.request import Request
from mfs_trt.scheduler.finish_time import decode_work
from mfs_trt.scheduler.step_cost import MIN_STEPS, StepCost, StepWork

DEFAULT_DRAFTS = 4  # where nothing is known
CANDIDATES = (1, 2, 3, 4, 5, 6, 8, 10, 12)  # longer drafts than the last are not tried
MARGIN = 1.03  # by which drafting must win: predictions are noisy
REVIEW_EVERY = 8  # steps between two choices for the same requests
PROBE_EVERY = 64  # steps until one draft is tried where drafting does not pay; then twice as many
MAX_PROBE_EVERY = 1024
FADING = 0.95  # weight of a verification after the next one
UNKNOWN = 0.7  # acceptance before any draft was verified
PRIOR_TRIALS = 4.0  # what the other requests' acceptance counts for a request's own


@dataclass
class Acceptance:
    """Share of drafts that stand, of those that were looked at: behind a rejected one none is."""

    accepted: float = 0.0
    trials: float = 0.0

    def observe(self, num_drafts: int, num_accepted: int) -> None:
        self.accepted = FADING * self.accepted + num_accepted
        self.trials = FADING * self.trials + num_accepted + (num_accepted < num_drafts)

    def estimate(self, prior: float) -> float:
        return (self.accepted + PRIOR_TRIALS * prior) / (self.trials + PRIOR_TRIALS)


def tokens_per_round(acceptance: float, num_drafts: float) -> float:
    """Expected tokens that stand after a verification of `num_drafts` drafts."""
    if acceptance >= 1:
        return num_drafts + 1
    return float((1 - acceptance ** (num_drafts + 1)) / (1 - acceptance))


@dataclass
class _Choice:
    lengths: tuple[int, ...]
    situation: tuple[object, ...]
    num_steps_left: int = REVIEW_EVERY


@dataclass
class _Probing:
    """When one draft is tried although drafting does not pay."""

    interval: int = PROBE_EVERY
    num_steps_left: int = PROBE_EVERY

    @property
    def is_due(self) -> bool:
        return self.num_steps_left == 0

    def step(self, is_drafting: bool) -> None:
        if is_drafting:
            self.interval = self.num_steps_left = PROBE_EVERY
        elif self.is_due:
            self.interval = min(2 * self.interval, MAX_PROBE_EVERY)
            self.num_steps_left = self.interval
        else:
            self.num_steps_left -= 1


class Drafting:
    """Lengths for all requests of the same levels together: they draft and verify in step."""

    def __init__(self, cost: StepCost) -> None:
        self._cost = cost
        self._by_request: dict[str, list[Acceptance]] = {}
        self._by_levels: dict[tuple[int, int], Acceptance] = {}  # (drafting tier, verifying tier)
        self._choices: dict[tuple[int, ...], _Choice] = {}
        self._probing: dict[tuple[int, ...], _Probing] = {}

    def observe(self, request: Request, level: int, num_drafts: int, num_accepted: int) -> None:
        """Drafts of `level` were verified by the level above it."""
        own = self._by_request.setdefault(
            request.request_id, [Acceptance() for _ in request.drafted_by_level]
        )
        own[level].observe(num_drafts, num_accepted)
        levels = request.levels[level], request.levels[level + 1]
        self._by_levels.setdefault(levels, Acceptance()).observe(num_drafts, num_accepted)

    def forget(self, request: Request) -> None:
        self._by_request.pop(request.request_id, None)

    def choose(self, running: Sequence[Request]) -> None:
        """Once a step, before `lengths`. What was chosen stands for some steps."""
        cohorts: dict[tuple[int, ...], list[Request]] = {}
        for request in running:
            if request.has_adaptive_drafts:
                cohorts.setdefault(request.levels, []).append(request)
        self._choices = {k: v for k, v in self._choices.items() if k in cohorts}
        for levels, cohort in cohorts.items():
            situation = (len(cohort), len(running))
            choice = self._choices.get(levels)
            if choice is None or choice.situation != situation or choice.num_steps_left == 0:
                members = set(map(id, cohort))
                others = [r for r in running if id(r) not in members]
                beside = decode_work(
                    [(r.tier, r.num_final_tokens) for r in others], self._cost.groups
                )
                best = self._best_lengths(levels, cohort, beside)
                choice = self._choices[levels] = _Choice(best, situation)
            choice.num_steps_left -= 1
            self._probing.setdefault(levels, _Probing()).step(choice.lengths[-1] > 0)

    def lengths(self, request: Request) -> tuple[int, ...]:
        """Drafts of each level before the next one verifies; 0 at the last: none are made."""
        choice = self._choices.get(request.levels)
        if choice is None:
            return (DEFAULT_DRAFTS,) * len(request.draft_levels)
        if self._probing[request.levels].is_due:
            return (1,) * len(choice.lengths)
        return choice.lengths

    def _best_lengths(
        self, levels: tuple[int, ...], cohort: Sequence[Request], beside: StepWork
    ) -> tuple[int, ...]:
        """From the lowest level up: the length that gives most tokens a second at the next one."""
        if self._cost.num_steps < MIN_STEPS:
            return (DEFAULT_DRAFTS,) * (len(levels) - 1)
        tokens, seconds = 1.0, self._pass_seconds(levels, 0, 0, cohort, beside)
        chosen: list[int] = []
        for level in range(1, len(levels)):
            acceptance = self._estimates(levels, level - 1, cohort)
            alone = self._pass_seconds(levels, level, 0, cohort, beside)
            best = (1 / max(alone, 1e-9) * MARGIN, 0, 1.0, alone)
            for length in CANDIDATES:
                num_rounds = -(-length // tokens)
                num_drafts = num_rounds * tokens
                wanted = self._pass_seconds(levels, level, num_drafts, cohort, beside)
                spent = num_rounds * seconds + wanted
                got = sum(tokens_per_round(a, num_drafts) for a in acceptance) / len(acceptance)
                best = max(best, (got / max(spent, 1e-9), length, got, spent))
            _, length, tokens, seconds = best
            chosen.append(length)
        return tuple(chosen)

    def _estimates(
        self, levels: tuple[int, ...], level: int, cohort: Sequence[Request]
    ) -> list[float]:
        pair = levels[level], levels[level + 1]
        prior = self._by_levels.get(pair, Acceptance()).estimate(UNKNOWN)
        own = (self._by_request.get(r.request_id) for r in cohort)
        return [prior if a is None else a[level].estimate(prior) for a in own]

    def _pass_seconds(
        self,
        levels: tuple[int, ...],
        level: int,
        num_drafts: float,
        cohort: Sequence[Request],
        beside: StepWork,
    ) -> float:
        """A step in which the cohort runs `level` on `num_drafts` drafts and one token more."""
        work = StepWork(list(beside.rows), beside.pairs, beside.contexts)
        context = sum(r.num_final_tokens for r in cohort) // len(cohort)
        below = levels[level - 1] if level else -1
        for s in range(levels[level] + 1):
            num_rows = 1 if s <= below else 1 + round(num_drafts)
            work.add(s, context, context + num_rows, self._cost.groups[s], len(cohort))
        return self._cost.predict(work)
