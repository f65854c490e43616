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
    priority: int = 0  # higher runs first
    deadline_s: float | None = None  # seconds from submission
    stop_token_ids: tuple[tuple[int, ...], ...] = ()  # stop words given as token sequences
    bad_token_ids: tuple[tuple[int, ...], ...] = ()  # bad words given as token sequences


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
    first_scheduled_time_s: float = 0.0  # monotonic clock
    error: MfsError | None = None


@dataclass(eq=False)
class Request:
    """One sequence in the scheduler. `token_ids` is prompt plus output; `append` makes it grow."""

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
    token_ids: list[int] = field(init=False)
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: list[int] = field(init=False)  # one per segment 0..tier
    status: RequestStatus = RequestStatus.WAITING
    row: int = -1  # row in the block tables while running
    num_preemptions: int = 0
    first_scheduled_time_s: float | None = None
    finish_reason: FinishReason | None = None
    cumulative_log_prob: float = 0.0

    def __post_init__(self) -> None:
        self.token_ids = [*self.prompt_token_ids, *self.output_token_ids]
        self.num_computed_tokens = [0] * (self.tier + 1)

    def append(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        self.output_token_ids.append(token_id)

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
