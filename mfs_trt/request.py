"""Request: one prompt and its generation at one tier, with the counters that scheduling chases.

`PromptRequest` is what a caller submits; the core makes one `Request` per sequence of it;
`TokenEvent` is what comes back, step by step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from mfs_trt.errors import MfsError
from mfs_trt.sampling_params import SamplingParams


class RequestStatus(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True)
class PromptRequest:
    """What a caller asks for. Exactly one of `prompt`, `token_ids`, `messages` is set."""

    request_id: str
    params: SamplingParams = SamplingParams()
    prompt: str | None = None
    token_ids: Sequence[int] | None = None
    messages: Sequence[dict[str, str]] | None = None  # chat turns: {"role": …, "content": …}
    tier: str | None = None  # None: the highest that min_tier/max_tier allow
    min_tier: str | None = None
    max_tier: str | None = None
    tier_policy: str | None = None  # explicit, deadline, load or cascade; None: the server's
    cascade_threshold: float | None = None  # mean log-probability of a token, natural
    priority: int = 0  # higher runs first
    deadline_s: float | None = None  # seconds from submission
    stop_token_ids: tuple[tuple[int, ...], ...] = ()  # stop words given as token sequences
    bad_token_ids: tuple[tuple[int, ...], ...] = ()  # bad words given as token sequences
    draft_tiers: tuple[str, ...] = ()  # ascending, below the tier: each drafts for the next
    num_speculative_tokens: int | None = None  # drafts of a level before the next one verifies
    reuse_prefix: bool = True  # False: takes nothing from the prefix cache, leaves nothing there
    cache_salt: str = ""  # only requests of the same salt share cached content


@dataclass(frozen=True)
class TokenEvent:
    """What one step produced for one sequence of a `PromptRequest`.

    `token_ids`, `log_probs` and `logits` are aligned and new since the last event, and so is
    `text`, which may lag behind the tokens while a character or a possible stop word is incomplete.
    A sequence's last event has a `finish_reason`. An event with `error` is the last of the whole
    request.
    """

    request_id: str
    sequence_index: int
    token_ids: tuple[int, ...] = ()
    text: str = ""
    log_probs: tuple[float, ...] = ()  # empty unless asked for
    logits: np.ndarray | None = None  # [len(token_ids), vocab_size] float32, unfiltered
    cumulative_log_prob: float = 0.0
    finish_reason: FinishReason | None = None
    tier: str = ""
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0  # so far
    num_kv_blocks: int = 0  # held, over all segments
    num_reused_blocks: int = 0  # of them, got from the prefix cache
    num_draft_tokens: int = 0  # decided on so far, over all levels
    num_accepted_draft_tokens: int = 0
    # Of a sequence's last event, per level that drafted: tier, drafts decided on, those that stood.
    drafts_by_level: tuple[tuple[str, int, int], ...] = ()
    first_scheduled_time_s: float = 0.0  # monotonic clock
    error: MfsError | None = None


@dataclass(eq=False)
class Request:
    """One sequence in the scheduler.

    `token_ids` is prompt, output and, behind them, drafts. Of its tokens `num_accepted[i]` stand at
    tier `levels[i]`: the last level is the tier that it runs at, the ones below draft for it. The
    tokens that stand there are final. Without speculation there is one level, and no draft.
    """

    request_id: str  # unique per sequence
    prompt_request: PromptRequest
    sequence_index: int
    prompt_token_ids: Sequence[int]
    tier: int  # index of the tier that it runs at; segments 0..tier
    params: SamplingParams
    seed: int
    end_token_ids: frozenset[int]
    bad_token_ids: tuple[tuple[int, ...], ...] = ()
    arrival_time_s: float = 0.0  # monotonic clock
    deadline_time_s: float | None = None
    highest_tier: int = -1  # that it may come to run at; -1: `tier`
    draft_levels: tuple[int, ...] = ()  # tiers below `tier` that draft, ascending
    asked_draft_levels: tuple[int, ...] = field(init=False)  # those it started with
    token_ids: list[int] = field(init=False)
    output_token_ids: list[int] = field(default_factory=list)  # final
    num_accepted: list[int] = field(init=False)  # one per level
    # What each draft behind the final tokens was drawn from, [vocab_size]; None under greedy.
    draft_probs: list[np.ndarray | None] = field(default_factory=list)
    drafted_by_level: list[int] = field(default_factory=list)  # drafts that were decided on
    accepted_by_level: list[int] = field(default_factory=list)  # of them, those that stood
    num_reported_tokens: int = 0  # output tokens that the caller has heard of
    num_draws: int = 0  # random numbers that speculation has used
    num_computed_tokens: list[int] = field(init=False)  # one per segment 0..tier
    num_reused_blocks: int = 0  # over all segments, got from the prefix cache
    status: RequestStatus = RequestStatus.WAITING
    row: int = -1  # row in the block tables while running
    num_preemptions: int = 0
    first_scheduled_time_s: float | None = None
    finish_reason: FinishReason | None = None
    cumulative_log_prob: float = 0.0

    def __post_init__(self) -> None:
        self.token_ids = [*self.prompt_token_ids, *self.output_token_ids]
        self.num_computed_tokens = [0] * (self.tier + 1)
        self.highest_tier = max(self.tier, self.highest_tier)
        self.num_accepted = [len(self.token_ids)] * len(self.levels)
        self.asked_draft_levels = self.draft_levels
        self.drafted_by_level = [0] * len(self.draft_levels)
        self.accepted_by_level = [0] * len(self.draft_levels)

    @property
    def num_drafted(self) -> int:
        return sum(self.drafted_by_level)

    @property
    def num_drafts_accepted(self) -> int:
        return sum(self.accepted_by_level)

    @property
    def levels(self) -> tuple[int, ...]:
        return (*self.draft_levels, self.tier)

    @property
    def has_adaptive_drafts(self) -> bool:
        """Whether it drafts as much as pays, for it asked for no number."""
        return bool(self.draft_levels) and self.prompt_request.num_speculative_tokens is None

    @property
    def num_final_tokens(self) -> int:
        """Tokens that stand at the request's own tier: prompt and output."""
        return self.num_accepted[-1]

    def stand(
        self,
        level: int,
        token_ids: Sequence[int],
        probs: Sequence[np.ndarray | None] = (),
    ) -> None:
        """`token_ids` follow the tokens that stand at `level`, in place of the drafts behind them.

        Lower levels and computed tokens fall back to what is still true. `probs`: what each of them
        was drawn from, wanted below the top level.
        """
        start = self.num_accepted[level]
        num_drafts = len(self.token_ids) - start
        if num_drafts:
            self.drafted_by_level[level - 1] += num_drafts
            self.accepted_by_level[level - 1] += min(num_drafts, len(token_ids) - 1)
        self.token_ids[start:] = token_ids
        for i in range(level + 1):
            self.num_accepted[i] = len(self.token_ids)
        # All but the last are drafts that were accepted: computed as what they are.
        for segment, count in enumerate(self.num_computed_tokens):
            if count >= len(self.token_ids):
                self.num_computed_tokens[segment] = len(self.token_ids) - 1
        if level == len(self.num_accepted) - 1:
            self.output_token_ids.extend(token_ids)
            self.draft_probs.clear()
        else:
            self.draft_probs[start - self.num_final_tokens :] = probs

    def move_to(self, tier: int) -> None:
        """Run at another tier from here on; drafts are dropped, final tokens stay."""
        self.drop_drafts()
        counts = self.num_computed_tokens[: tier + 1]
        self.num_computed_tokens = counts + [0] * (tier + 1 - len(counts))
        self.tier = tier
        self.highest_tier = max(tier, self.highest_tier)
        self.draft_levels = tuple(t for t in self.asked_draft_levels if t < tier)
        self.num_accepted = [self.num_final_tokens] * len(self.levels)

    def drop_drafts(self) -> None:
        """Only what is final remains."""
        final = self.num_final_tokens
        del self.token_ids[final:]
        self.draft_probs.clear()
        self.num_accepted = [final] * len(self.levels)
        for segment, count in enumerate(self.num_computed_tokens):
            self.num_computed_tokens[segment] = min(count, max(0, final - 1))

    @property
    def priority(self) -> int:
        return self.prompt_request.priority

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    @property
    def max_num_tokens(self) -> int:
        """Tokens that it can come to hold: prompt plus `max_tokens`."""
        return self.num_prompt_tokens + self.params.max_tokens

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED
