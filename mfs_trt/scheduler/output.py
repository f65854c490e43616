"""What one `schedule()` decided, as data: items `(request, segment, first token, last token)`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(frozen=True)
class SegmentItems:
    """The work items of one segment, deepest tiers first. `num_items` requests."""

    rows: np.ndarray  # [num_items] int32: the request's row in the block tables
    first_tokens: np.ndarray  # [num_items] int32
    last_tokens: np.ndarray  # [num_items] int32, exclusive
    stored_from: np.ndarray  # [num_items] int32: keys and values of earlier tokens exist already
    saved_from: np.ndarray  # [num_items] int32: from here on, features are kept above this segment
    exit_items: np.ndarray  # [num_exits] int32: items whose last rows' logits are wanted here
    exit_counts: np.ndarray  # [num_exits] int32: how many rows of each

    @property
    def num_rows(self) -> int:
        return int((self.last_tokens - self.first_tokens).sum())

    @property
    def num_rows_again(self) -> int:
        """Of them, those whose keys and values exist: run for a feature that was gone."""
        again = np.minimum(self.last_tokens, self.stored_from) - self.first_tokens
        return int(np.maximum(again, 0).sum())


@dataclass(frozen=True)
class SchedulerOutput:
    """A step. `segments[s]` is None where no request needs segment s."""

    segments: tuple[SegmentItems | None, ...]
    input_ids: np.ndarray  # [tokens of segment 0] int32
    # (request id, computed tokens per segment after the step)
    computed: tuple[tuple[str, tuple[int, ...]], ...]
    sampled: tuple[tuple[str, ...], ...]  # per segment: request ids in the order of its exit_items
    levels: dict[str, int]  # per sampled request: the level that its rows are decided at
    preempted: tuple[str, ...]

    @property
    def is_empty(self) -> bool:
        return not self.computed

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)


class Decided(Protocol):
    """What a step decided for one request: tokens that follow those which stand at its level."""

    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def probs(self) -> Sequence[np.ndarray | None]: ...
