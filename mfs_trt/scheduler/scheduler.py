"""Scheduler: which tokens of which segments each step computes.

The one rule: every request has, per segment, a count of computed tokens that chases the count of
known tokens. Prefill, chunked prefill and decode are gaps of different size; tiers differ in how
many segments chase.
"""

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from mfs_trt.engine.interface import EngineLimits
from mfs_trt.errors import RequestTooLargeError
from mfs_trt.kv_cache.manager import KVCacheManager
from mfs_trt.request import FinishReason, Request, RequestStatus
from mfs_trt.scheduler.output import Decided, SchedulerOutput, SegmentItems
from mfs_trt.scheduler.pacing import Pacing
from mfs_trt.scheduler.plan import Plan, level_to_run, make_plan
from mfs_trt.scheduler.queue import WaitingQueue, rank

MAX_SET_ASIDE = 16  # waiting requests that do not fit, until a step looks no further
DEFAULT_DRAFTS = 4
MAX_PASSES = 64  # times a request that does not fit may be passed before it blocks the queue


class Scheduler:
    """Owns the queues and the counts of all requests; no tensors, no clocks."""

    def __init__(
        self, limits: EngineLimits, kv_cache: KVCacheManager, pacing: Pacing | None = None
    ) -> None:
        """`pacing` None: prompts take all rows that decodes leave."""
        self.limits = limits
        self.kv_cache = kv_cache
        self.pacing = pacing
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
        rows_left = [self.limits.max_num_batched_tokens] * self._num_segments
        plans: dict[str, Plan] = {}
        preempted: list[str] = []
        self._schedule_running(rows_left, plans, preempted)
        self._schedule_waiting(rows_left, plans, preempted)
        return self._output(list(plans.values()), preempted)

    @property
    def _num_segments(self) -> int:
        return len(self.kv_cache.spec.groups_per_segment)

    def _schedule_running(
        self, rows_left: list[int], plans: dict[str, Plan], preempted: list[str]
    ) -> None:
        """Small gaps first: a long prompt takes what running decodes leave of the budget."""
        gaps = {id(r): r.num_computed_tokens[-1] < r.num_final_tokens - 1 for r in self.running}
        are_decodes_planned = False
        for request in sorted(self.running, key=lambda r: gaps[id(r)]):
            if request.status is not RequestStatus.RUNNING:
                continue  # a preemption earlier in this loop
            if gaps[id(request)] and not are_decodes_planned:
                are_decodes_planned = True
                self._leave_time(rows_left)
            plan = self._plan(request, rows_left)
            if plan is None:
                continue
            victims = self._victims(request, below=rank(request))
            while not self.kv_cache.allocate_slots(request, plan.last):
                victim = next(victims, None)
                if victim is None:
                    break  # set aside: whoever ranks higher finishes first and frees memory
                self._preempt(victim, rows_left, plans, preempted)
            else:
                self._take(plan, rows_left, plans)
        if not are_decodes_planned:
            self._leave_time(rows_left)

    def _leave_time(self, rows_left: list[int]) -> None:
        """What is left of the budget is for prompts: no more than running decodes can bear."""
        if self.pacing is None:
            return
        budget = self.limits.max_num_batched_tokens
        most = self.pacing.prompt_rows([budget - left for left in rows_left])
        if most is not None:
            rows_left[:] = [min(left, most) for left in rows_left]

    def _schedule_waiting(
        self, rows_left: list[int], plans: dict[str, Plan], preempted: list[str]
    ) -> None:
        """Admit in rank order; what does not fit now is set aside and may be passed, for a while.

        Whoever was preempted in this step waits for the next, and nobody behind passes.
        """
        passed: list[Request] = []
        for request in list(self.waiting):
            if rows_left[0] <= 0 or self._is_behind(request, preempted):
                break
            self.kv_cache.open(request)
            plan = self._plan(request, rows_left)
            if plan is None or not self._admit(request, plan, rows_left, plans, preempted):
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
            self._take(plan, rows_left, plans)

    def _is_behind(self, request: Request, preempted: list[str]) -> bool:
        return any(rank(self.requests[other]) <= rank(request) for other in preempted)

    def _is_overtaken(self, request: Request) -> bool:
        return self._num_passes.get(request.request_id, 0) >= MAX_PASSES

    def _admit(
        self,
        request: Request,
        plan: Plan,
        rows_left: list[int],
        plans: dict[str, Plan],
        preempted: list[str],
    ) -> bool:
        """A seat and memory for all that is known of `request`; lower priorities make way."""
        room = [request.num_tokens] * len(request.num_computed_tokens)
        victims = self._who_makes_way(request, room)
        if victims is None:
            return False
        for victim in victims:
            self._preempt(victim, rows_left, plans, preempted)
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

    def _plan(self, request: Request, rows_left: list[int]) -> Plan | None:
        level = level_to_run(request, self.draft_lengths(request))
        features = self.kv_cache.features
        return make_plan(request, level, rows_left, partial(features.end, request))

    def draft_lengths(self, request: Request) -> Sequence[int]:
        """Drafts that each level makes before the next one verifies them, all in one step."""
        if not request.draft_levels:
            return ()
        num_levels = len(request.draft_levels)
        if not self.kv_cache.features.has_room:
            return (0,) * num_levels
        wanted = request.prompt_request.num_speculative_tokens
        most = (self.limits.max_num_batched_tokens - 1) // num_levels
        return (min(DEFAULT_DRAFTS if wanted is None else wanted, most),) * num_levels

    def _take(self, plan: Plan, rows_left: list[int], plans: dict[str, Plan]) -> None:
        for segment, last in enumerate(plan.last):
            rows_left[segment] -= last - plan.first[segment]
        plans[plan.request.request_id] = plan

    def _victims(self, request: Request, below: tuple[float | str, ...]) -> Iterator[Request]:
        """Running requests that rank behind `below` and may make way for `request`, last first."""
        for other in reversed(list(self.running)):
            if other is not request and rank(other) > below:
                yield other

    def _preempt(
        self,
        victim: Request,
        rows_left: list[int],
        plans: dict[str, Plan],
        preempted: list[str],
    ) -> None:
        """Take the victim's memory; it waits and is computed again from the start."""
        plan = plans.pop(victim.request_id, None)
        if plan is not None:
            for segment, (first, last) in enumerate(zip(plan.first, plan.last, strict=True)):
                rows_left[segment] += last - first
        self.running.remove(victim)
        self.kv_cache.close(victim)
        victim.drop_drafts()
        victim.num_computed_tokens = [0] * len(victim.num_computed_tokens)
        victim.num_preemptions += 1
        victim.status = RequestStatus.WAITING
        self.waiting.add(victim)
        self.num_preemptions += 1
        preempted.append(victim.request_id)

    def _output(self, plans: Sequence[Plan], preempted: list[str]) -> SchedulerOutput:
        """Deepest first: a deeper segment's rows are mostly the first rows of the one below."""
        ordered = sorted(plans, key=lambda p: -p.depth)
        segments: list[SegmentItems | None] = []
        sampled: list[tuple[str, ...]] = []
        for s in range(self._num_segments):
            items = [p for p in ordered if s <= p.depth and p.last[s] > p.first[s]]
            exits = [(i, n) for i, p in enumerate(items) if p.depth == s and (n := p.num_exit_rows)]
            sampled.append(tuple(items[i].request.request_id for i, _ in exits))
            if not items:
                segments.append(None)
                continue
            table = np.array([self._item(p, s) for p in items], np.int32)
            exit_table = np.array(exits, np.int32).reshape(-1, 2)
            segments.append(SegmentItems(*table.T.copy(), *exit_table.T.copy()))
            self.num_rows[s] += int((table[:, 2] - table[:, 1]).sum())
        input_ids: list[int] = []
        for plan in ordered:
            input_ids += plan.request.token_ids[plan.first[0] : plan.last[0]]
        return SchedulerOutput(
            segments=tuple(segments),
            input_ids=np.array(input_ids, np.int32),
            computed=tuple((p.request.request_id, tuple(p.counts)) for p in ordered),
            sampled=tuple(sampled),
            levels={p.request.request_id: p.level for p in ordered},
            preempted=tuple(preempted),
        )

    def _item(self, plan: Plan, s: int) -> tuple[int, int, int, int, int]:
        """Row, first and last token, and from where on keys and values, and features, are kept.

        Features are kept of rows that the segment above does not take in this step, as far as the
        pool has room.
        """
        request, first, last = plan.request, plan.first[s], plan.last[s]
        stored_from = request.num_computed_tokens[s]
        if stored_from > first:
            self.num_rows_again[s] += min(last, stored_from) - first
        saved_from = last
        if s < plan.depth and plan.last[s + 1] == last:
            pass  # the segment above takes them all: the usual case
        elif s + 1 < self._num_segments and self.kv_cache.features.has_room:
            counts = request.num_computed_tokens
            above = counts[s + 1] if s + 1 < len(counts) else 0
            if s < plan.depth:
                above = max(above, plan.last[s + 1])
            saved_from = max(first, above)
            if saved_from < last and not self.kv_cache.features.reserve(
                request, s, saved_from, last, above
            ):
                saved_from = last
        return request.row, first, last, stored_from, saved_from

    def update(self, output: SchedulerOutput, decided: dict[str, Decided]) -> None:
        """The step ran: move the counts, put the decided tokens behind those that stand at their
        level, finish what they end.

        Of the tokens of a request's own tier those behind its last one are left out.
        """
        for request_id, computed in output.computed:
            self.requests[request_id].num_computed_tokens = list(computed)
        finished: list[tuple[Request, FinishReason]] = []
        for request_id, decision in decided.items():
            request = self.requests[request_id]
            level, token_ids = output.levels[request_id], decision.token_ids
            if level == len(request.num_accepted) - 1:
                token_ids, reason = self._until_finished(request, token_ids)
                if reason is not None:
                    finished.append((request, reason))
            request.stand(level, token_ids, decision.probs)
            self.kv_cache.features.rewind(request)
        for request_id, _ in output.computed:
            self.kv_cache.commit(self.requests[request_id])
        for request, reason in finished:
            self.finish(request, reason)

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
