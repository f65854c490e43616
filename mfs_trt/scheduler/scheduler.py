"""Scheduler: which tokens of which segments each step computes.

The one rule: every request has, per segment, a count of computed tokens that chases the count of
known tokens. Prefill, chunked prefill and decode are gaps of different size; tiers differ in how
many segments chase.
"""

from collections.abc import Iterator, Sequence
from functools import partial

from mfs_trt.engine.interface import EngineLimits
from mfs_trt.errors import RequestTooLargeError
from mfs_trt.kv_cache.manager import KVCacheManager
from mfs_trt.request import FinishReason, Request, RequestStatus
from mfs_trt.scheduler.assembly import assemble
from mfs_trt.scheduler.drafting import DEFAULT_DRAFTS, Drafting
from mfs_trt.scheduler.open_step import OpenStep
from mfs_trt.scheduler.output import Decided, SchedulerOutput
from mfs_trt.scheduler.pacing import MIN_ROWS, Pacing
from mfs_trt.scheduler.plan import Plan, level_to_run, make_plan
from mfs_trt.scheduler.queue import WaitingQueue, rank
from mfs_trt.scheduler.step_cost import work_of_plans

MAX_SET_ASIDE = 16  # waiting requests that do not fit, until a step looks no further
MAX_PASSES = 64  # times a request that does not fit may be passed before it blocks the queue


class Scheduler:
    """Owns the queues and the counts of all requests; no tensors, no clocks."""

    def __init__(
        self,
        limits: EngineLimits,
        kv_cache: KVCacheManager,
        pacing: Pacing | None = None,
        drafting: Drafting | None = None,
    ) -> None:
        """`pacing` None: prompts take all rows that decodes leave. `drafting` None: the number of
        drafts is fixed.
        """
        self.limits = limits
        self.kv_cache = kv_cache
        self.pacing, self.drafting = pacing, drafting
        self.requests: dict[str, Request] = {}
        self.waiting = WaitingQueue()
        self.running: list[Request] = []  # in rank order
        self.num_preemptions = 0
        self.num_rows = [0] * self._num_segments  # run so far, per segment
        self.num_rows_again = [0] * self._num_segments  # of them, for a feature that was gone
        self._num_passes: dict[str, int] = {}

    @property
    def has_requests(self) -> bool:
        return bool(self.requests)

    # -- arrivals and departures -----------------------------------------------------------------

    def check_fits(self, request: Request) -> None:
        """Raise `RequestTooLargeError`, naming both numbers, for what can never run."""
        wanted, limit = request.max_num_tokens, self.limits.max_model_len
        if wanted > limit:
            raise RequestTooLargeError(
                f"prompt of {request.num_prompt_tokens} tokens plus max_tokens "
                f"{request.params.max_tokens} is {wanted} tokens, "
                f"more than the engine's max_model_len of {limit}"
            )
        if not self.kv_cache.can_ever_fit(request):
            raise RequestTooLargeError(
                f"request needs {self.kv_cache.max_frames(request)} KV frames "
                f"({wanted} tokens at tier {request.tier}), more than the arena's "
                f"{self.kv_cache.pool.num_usable_frames}"
            )

    def add(self, request: Request) -> None:
        """Queue a request that `check_fits` accepts."""
        assert request.request_id not in self.requests, request.request_id
        self.requests[request.request_id] = request
        self.waiting.add(request)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request, wherever it stands, and free what it holds."""
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        elif request.status is RequestStatus.WAITING:
            self.waiting.remove(request)
        self.kv_cache.forget(request)
        if self.drafting is not None:
            self.drafting.forget(request)
        self._num_passes.pop(request.request_id, None)
        del self.requests[request.request_id]
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason

    def switch(self, request: Request, tier: int) -> None:
        """Run an unfinished request at another tier from its next token on.

        Up: deeper segments start to chase, fed from kept features. Down: their blocks are freed.
        Raises `RequestTooLargeError` when the arena could never hold it there.
        """
        before = request.tier, request.highest_tier
        request.highest_tier = max(tier, request.highest_tier)
        if not self.kv_cache.can_ever_fit(request):
            needed = self.kv_cache.max_frames(request)
            request.highest_tier = before[1]
            raise RequestTooLargeError(
                f"tier: request needs {needed} KV frames at tier {tier}, more than the arena's "
                f"{self.kv_cache.pool.num_usable_frames}"
            )
        request.move_to(tier)
        if tier < before[0]:
            self.kv_cache.cut(request, tier + 1)
        elif request.status is RequestStatus.RUNNING:
            self.kv_cache.extend(request, before[0] + 1)
        self.kv_cache.features.rewind(request)

    # -- one step --------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        """Decide a step and allocate its memory; counts move when `update` hears that it ran."""
        step = OpenStep([self.limits.max_num_batched_tokens] * self._num_segments)
        self._schedule_running(step)
        self._schedule_waiting(step)
        plans = list(step.plans.values())
        saved_from = self._keep_features(plans)
        return assemble(plans, saved_from, step.preempted, self._num_segments)

    @property
    def _num_segments(self) -> int:
        return len(self.kv_cache.spec.groups_per_segment)

    def _schedule_running(self, step: OpenStep) -> None:
        """Small gaps first: a long prompt takes what running decodes leave of the budget."""
        step.levels = self._choose_levels()
        gaps = {id(r): _has_gap(r) for r in self.running}
        for request in sorted(self.running, key=lambda r: gaps[id(r)]):
            if request.status is not RequestStatus.RUNNING:
                continue  # a preemption earlier in this loop
            plan = self._plan(request, step)
            if plan is None:
                continue
            victims = self._victims(request, below=rank(request))
            while not self.kv_cache.allocate_slots(request, plan.last):
                victim = next(victims, None)
                if victim is None:
                    break  # set aside: whoever ranks higher finishes first and frees memory
                self._preempt(victim, step)
            else:
                self._take(plan, step)

    def _choose_levels(self) -> dict[str, int]:
        """The level that each running request runs towards, where some draft; else nothing.

        Whoever drafts by what it pays goes as deep as the step goes in any case: it verifies then.
        """
        if self.drafting is None or not any(r.draft_levels for r in self.running):
            return {}
        self.drafting.choose(self.running)
        levels = {r.request_id: level_to_run(r, self.draft_lengths(r)) for r in self.running}
        deepest = max(r.levels[levels[r.request_id]] for r in self.running)
        for request in self.running:
            if request.has_adaptive_drafts:
                reached = sum(tier <= deepest for tier in request.levels) - 1
                levels[request.request_id] = max(levels[request.request_id], reached)
        return levels

    def _schedule_waiting(self, step: OpenStep) -> None:
        """Admit in the queue's order; what does not fit now is set aside and may be passed for a
        while.

        Whoever was preempted in this step waits for the next, and nobody behind passes.
        """
        passed: list[Request] = []
        for request in list(self.waiting):
            if step.rows_left[0] <= 0 or self._is_behind(request, step.preempted):
                break
            self.kv_cache.open(request)
            plan = self._plan(request, step)
            if plan is None or not self._admit(request, plan, step):
                self.kv_cache.close(request)
                request.num_computed_tokens = [0] * len(request.num_computed_tokens)
                if plan is None:
                    break
                if len(self.running) >= self.limits.max_num_seqs:
                    break
                if request.num_preemptions or self._is_overtaken(request):
                    break
                passed.append(request)
                if len(passed) == MAX_SET_ASIDE:
                    break
                continue
            for other in passed:
                self._num_passes[other.request_id] = self._num_passes.get(other.request_id, 0) + 1
            self.waiting.remove(request)
            self._num_passes.pop(request.request_id, None)
            request.status = RequestStatus.RUNNING
            self.running.append(request)
            self.running.sort(key=rank)
            self._take(plan, step)

    def _is_behind(self, request: Request, preempted: list[str]) -> bool:
        return any(rank(self.requests[other]) <= rank(request) for other in preempted)

    def _is_overtaken(self, request: Request) -> bool:
        return self._num_passes.get(request.request_id, 0) >= MAX_PASSES

    def _admit(self, request: Request, plan: Plan, step: OpenStep) -> bool:
        """A seat and memory for all that is known of `request`; lower priorities make way."""
        room = [request.num_tokens] * len(request.num_computed_tokens)
        victims = self._who_makes_way(request, room)
        if victims is None:
            return False
        for victim in victims:
            self._preempt(victim, step)
        return self.kv_cache.allocate_slots(request, plan.last)

    def _who_makes_way(self, request: Request, room: list[int]) -> list[Request] | None:
        """The running requests of lower priority without which `request` fits; None: it would not.

        It fits when there is room beside one more block for each running request: the reserve keeps
        an admission from preempting its neighbours a step later.
        """
        one_block = self.kv_cache.spec.frames_needed
        reserve = sum(one_block(other.tier, 1) for other in self.running)
        missing = self.kv_cache.missing_frames(request, room)
        free, num_running = self.kv_cache.pool.num_free_frames, len(self.running)
        candidates = self._victims(request, below=(-request.priority + 1,))
        chosen: list[Request] = []
        while num_running >= self.limits.max_num_seqs or missing + reserve > free:
            victim = next(candidates, None)
            if victim is None:
                return None
            chosen.append(victim)
            num_running -= 1
            reserve -= one_block(victim.tier, 1)
            free += self.kv_cache.num_frames_held(victim)
        return chosen

    def _plan(self, request: Request, step: OpenStep) -> Plan | None:
        level = step.levels.get(request.request_id)
        if level is None:
            level = level_to_run(request, self.draft_lengths(request))
        rows_left = self._rows_left(request, step)
        features = self.kv_cache.features
        return make_plan(request, level, rows_left, partial(features.end, request))

    def _rows_left(self, request: Request, step: OpenStep) -> list[int]:
        """The budget; of prompts, no more than running decodes can bear."""
        if self.pacing is None or not _has_gap(request):
            return step.rows_left
        if not step.is_paced:
            groups = self.kv_cache.spec.groups_per_segment
            decodes = work_of_plans(step.plans.values(), groups)
            num_decodes = len(step.plans)
            num_prompts = min(len(self.requests), self.limits.max_num_seqs) - num_decodes
            spare_s = self.pacing.spare_seconds(decodes, num_decodes, num_prompts)
            step.is_paced, step.spare_s = True, spare_s
        if step.spare_s is None:
            return step.rows_left
        most = self.pacing.cost.rows_within(step.spare_s, request.num_computed_tokens[-1])
        if not step.has_prompt:
            most = max(most, MIN_ROWS)
        return [min(left, most) for left in step.rows_left]

    def draft_lengths(self, request: Request) -> Sequence[int]:
        """Drafts that each level makes before the next one verifies them, all in one step."""
        if not request.draft_levels:
            return ()
        num_levels = len(request.draft_levels)
        if not self.kv_cache.features.has_room:
            return (0,) * num_levels
        most = (self.limits.max_num_batched_tokens - 1) // num_levels
        wanted = request.prompt_request.num_speculative_tokens
        if wanted is not None:
            return (min(wanted, most),) * num_levels
        if self.drafting is None:
            return (min(DEFAULT_DRAFTS, most),) * num_levels
        return [min(length, most) for length in self.drafting.lengths(request)]

    def _take(self, plan: Plan, step: OpenStep) -> None:
        step.take(plan)
        if step.is_paced:
            step.has_prompt = True
            if step.spare_s is not None and self.pacing is not None:
                num_rows = max(b - a for a, b in zip(plan.first, plan.last, strict=True))
                step.spare_s -= self.pacing.cost.row_seconds(num_rows, plan.first[-1])

    def _victims(self, request: Request, below: tuple[float | str, ...]) -> Iterator[Request]:
        """Running requests that rank behind `below` and may make way for `request`, last first."""
        for other in reversed(list(self.running)):
            if other is not request and rank(other) > below:
                yield other

    def _preempt(self, victim: Request, step: OpenStep) -> None:
        """Take the victim's memory; it waits and is computed again from the start."""
        step.preempt(victim.request_id)
        self.running.remove(victim)
        self.kv_cache.close(victim)
        victim.drop_drafts()
        victim.num_computed_tokens = [0] * len(victim.num_computed_tokens)
        victim.num_preemptions += 1
        victim.status = RequestStatus.WAITING
        self.waiting.add(victim)
        self.num_preemptions += 1

    def _keep_features(self, plans: Sequence[Plan]) -> list[dict[str, int]]:
        """Room for the features of rows that the segment above does not take in this step, as far
        as the pool has any. → per boundary: request id → first token kept.
        """
        features, top = self.kv_cache.features, self._num_segments - 1
        saved_from: list[dict[str, int]] = [{} for _ in range(top)]
        if not features.has_room:
            return saved_from
        for plan in plans:
            request, first, last, depth = plan.request, plan.first, plan.last, plan.depth
            if depth == top and last[0] == last[-1]:
                continue  # the segments above take them all: the usual case
            counts = request.num_computed_tokens
            for s in range(min(depth + 1, top)):
                above = counts[s + 1] if s + 1 < len(counts) else 0
                if s < depth:
                    above = max(above, last[s + 1])
                start = max(first[s], above)
                if start < last[s] and features.reserve(request, s, start, last[s], above):
                    saved_from[s][request.request_id] = start
        return saved_from

    def update(self, output: SchedulerOutput, decided: dict[str, Decided]) -> None:
        """The step ran: move the counts, put the decided tokens behind those that stand at their
        level, finish what they end.

        Of the tokens of a request's own tier those behind its last one are left out.
        """
        for s, items in enumerate(output.segments):
            if items is not None:
                self.num_rows[s] += items.num_rows
                self.num_rows_again[s] += items.num_rows_again
        for request_id, computed in output.computed:
            self.requests[request_id].num_computed_tokens = list(computed)
        finished: list[tuple[Request, FinishReason]] = []
        for request_id, decision in decided.items():
            request = self.requests[request_id]
            level, token_ids = output.levels[request_id], decision.token_ids
            if level < len(request.num_accepted) - 1:
                # The request's last token is never computed, so it is no use as a draft.
                token_ids = token_ids[: request.max_num_tokens - 1 - request.num_accepted[level]]
            else:
                token_ids, reason = self._until_finished(request, token_ids)
                if reason is not None:
                    finished.append((request, reason))
            if level:
                self._observe_drafts(request, level, token_ids)
            request.stand(level, token_ids, decision.probs[: len(token_ids)])
            if level:  # drafts may have fallen
                self.kv_cache.features.rewind(request)
        for request_id, _ in output.computed:
            self.kv_cache.commit(self.requests[request_id])
        for request, reason in finished:
            self.finish(request, reason)

    def _observe_drafts(self, request: Request, level: int, token_ids: Sequence[int]) -> None:
        """Of the drafts that `level` decides on, those which the level just below it made."""
        num_drafts = request.num_accepted[level - 1] - request.num_accepted[level]
        if num_drafts and self.drafting is not None:
            num_accepted = min(num_drafts, len(token_ids) - 1)
            self.drafting.observe(request, level - 1, num_drafts, num_accepted)

    def _until_finished(
        self, request: Request, token_ids: Sequence[int]
    ) -> tuple[Sequence[int], FinishReason | None]:
        """The tokens up to the one that ends the request, and why it does."""
        num_output = request.num_output_tokens
        for i, token_id in enumerate(token_ids, start=1):
            if token_id in request.end_token_ids and num_output + i >= request.params.min_tokens:
                return token_ids[:i], FinishReason.STOP
            if num_output + i >= request.params.max_tokens:
                return token_ids[:i], FinishReason.LENGTH
        return token_ids, None


def _has_gap(request: Request) -> bool:
    """Whether more than the next token is to be computed, drafts aside."""
    return request.num_computed_tokens[-1] < request.num_final_tokens - 1
