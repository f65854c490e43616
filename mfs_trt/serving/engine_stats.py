"""What an engine has done and does: counters over its whole life, and snapshots of them."""

from collections import Counter
from dataclasses import dataclass, field

from mfs_trt.request import TokenEvent
from mfs_trt.scheduler.scheduler import Scheduler
from mfs_trt.serving.core import EngineCore


@dataclass(frozen=True)
class EngineStats:
    """A snapshot of counters and gauges."""

    num_waiting: int
    num_running: int
    num_open_requests: int
    num_frames_total: int
    num_frames_used: int
    block_size: int
    num_steps_total: int
    num_preemptions_total: int
    num_rows_by_segment: tuple[int, ...]
    num_reused_tokens_by_segment: tuple[int, ...]
    draft_tokens_by_tier: dict[str, int]  # by the tier that made them; once decided on
    accepted_draft_tokens_by_tier: dict[str, int]
    num_prompt_tokens_total: int
    num_output_tokens_total: int
    num_requests_finished_total: int
    num_requests_failed_total: int
    output_tokens_by_tier: dict[str, int]
    num_tier_switches: dict[tuple[str, str], int]  # by policy and direction
    last_step_duration_s: float
    is_healthy: bool
    is_draining: bool


@dataclass
class EngineCounters:
    """What schedulers and events have come to; a scheduler is replaced when a step fails."""

    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_finished: int = 0
    num_failed: int = 0
    draft_tokens_by_tier: Counter[str] = field(default_factory=Counter)
    accepted_draft_tokens_by_tier: Counter[str] = field(default_factory=Counter)
    output_tokens_by_tier: Counter[str] = field(default_factory=Counter)
    # of the schedulers before the present one
    num_preemptions: int = 0
    rows_by_segment: Counter[int] = field(default_factory=Counter)
    reused_tokens_by_segment: Counter[int] = field(default_factory=Counter)

    def count(self, event: TokenEvent, is_last: bool) -> None:
        """An event was answered; `is_last`: its request is over."""
        if event.token_ids:
            self.num_output_tokens += len(event.token_ids)
            self.output_tokens_by_tier[event.tier] += len(event.token_ids)
        for tier, num_drafts, num_accepted in event.drafts_by_level:
            self.draft_tokens_by_tier[tier] += num_drafts
            self.accepted_draft_tokens_by_tier[tier] += num_accepted
        if is_last:
            self.num_finished += event.error is None
            self.num_failed += event.error is not None
            self.num_prompt_tokens += event.num_prompt_tokens

    def keep(self, scheduler: Scheduler) -> None:
        """Take over the counts of a scheduler that is about to be replaced."""
        self.num_preemptions += scheduler.num_preemptions
        self.rows_by_segment.update(dict(enumerate(scheduler.num_rows)))
        self.reused_tokens_by_segment.update(dict(enumerate(scheduler.kv_cache.num_reused_tokens)))

    def stats(
        self,
        core: EngineCore,
        *,
        num_arrived: int,
        num_open_requests: int,
        is_healthy: bool,
        is_draining: bool,
    ) -> EngineStats:
        """`num_arrived`: requests that the scheduler has not seen yet."""
        scheduler = core.scheduler
        kv_cache = scheduler.kv_cache
        reused = kv_cache.num_reused_tokens
        return EngineStats(
            num_waiting=len(scheduler.waiting) + num_arrived,
            num_running=len(scheduler.running),
            num_open_requests=num_open_requests,
            num_frames_total=kv_cache.pool.num_usable_frames,
            num_frames_used=kv_cache.num_used_frames,
            block_size=kv_cache.spec.block_size,
            num_steps_total=core.num_steps,
            num_preemptions_total=self.num_preemptions + scheduler.num_preemptions,
            num_rows_by_segment=tuple(
                self.rows_by_segment[s] + n for s, n in enumerate(scheduler.num_rows)
            ),
            num_reused_tokens_by_segment=tuple(
                self.reused_tokens_by_segment[s] + n for s, n in enumerate(reused)
            ),
            draft_tokens_by_tier=dict(self.draft_tokens_by_tier),
            accepted_draft_tokens_by_tier=dict(self.accepted_draft_tokens_by_tier),
            num_prompt_tokens_total=self.num_prompt_tokens,
            num_output_tokens_total=self.num_output_tokens,
            num_requests_finished_total=self.num_finished,
            num_requests_failed_total=self.num_failed,
            output_tokens_by_tier=dict(self.output_tokens_by_tier),
            num_tier_switches=dict(core.num_tier_switches),
            last_step_duration_s=core.last_step_duration_s,
            is_healthy=is_healthy,
            is_draining=is_draining,
        )
