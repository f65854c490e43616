"""How far each segment of one request gets in a step: the one rule, in numbers. Pure.

A segment computes the tokens between its count and the goal. A token's hidden state comes from the
segment below in the same step, or from a kept feature; where that is gone, the segment below runs
the token again, without storing keys and values that exist.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from mfs_trt.request import Request

# (boundary, first token) → end of the features kept from there on
FeaturesEnd = Callable[[int, int], int]


class Plan(NamedTuple):
    """One request's part of a step: `[first[s], last[s])` per segment up to `depth`."""

    request: Request
    level: int  # whose exit it runs towards, index in `request.levels`
    depth: int  # the deepest segment of that level
    first: list[int]
    last: list[int]

    @property
    def num_exit_rows(self) -> int:
        """Last rows of segment `depth` whose logits are wanted: one for each token to decide."""
        request = self.request
        if self.last[self.depth] < len(request.token_ids):
            return 0
        return len(request.token_ids) - request.num_accepted[self.level] + 1

    @property
    def counts(self) -> tuple[int, ...]:
        """Computed tokens per segment when the step is over."""
        counts = self.request.num_computed_tokens
        reached = [b if b > a else a for a, b in zip(counts, self.last, strict=False)]
        return (*reached, *counts[len(reached) :])


def level_to_run(request: Request, draft_lengths: Sequence[int]) -> int:
    """Index of the level whose exit the request runs towards now.

    A level drafts until `draft_lengths[level]` of its tokens wait for the level above, or no more
    are wanted; then that level verifies, the highest one that has cause to first. While the deepest
    segments have more to catch up with than drafts, they do that before anything else. A level that
    has run the last token already, as while deeper segments caught up, has nothing to run.
    """
    accepted = request.num_accepted
    computed = request.num_computed_tokens
    top = len(accepted) - 1
    if top == 0 or computed[-1] < accepted[-1] - 1:
        return top
    level = _wanted_level(request, draft_lengths)
    while level < top and computed[request.draft_levels[level]] >= len(request.token_ids):
        level += 1
    return level


def _wanted_level(request: Request, draft_lengths: Sequence[int]) -> int:
    accepted = request.num_accepted
    top = len(accepted) - 1
    for level in reversed(range(top)):
        wanted = min(draft_lengths[level], request.max_num_tokens - accepted[level + 1] - 1)
        num_drafts = accepted[level] - accepted[level + 1]
        is_ended = num_drafts > 0 and request.token_ids[-1] in request.end_token_ids
        if num_drafts >= wanted or is_ended:
            return level + 1
    return 0


def make_plan(
    request: Request, level: int, rows_left: Sequence[int], features_end: FeaturesEnd
) -> Plan | None:
    """The request's rows of a step within `rows_left` per segment; None where it has none."""
    counts = request.num_computed_tokens
    goal = len(request.token_ids)
    depth = request.draft_levels[level] if level < len(request.draft_levels) else request.tier
    first = counts[: depth + 1]
    for s in range(depth - 1, -1, -1):
        if first[s + 1] < first[s]:
            first[s] = min(first[s], features_end(s, first[s + 1]))
    last = []
    reached = goal
    for start, left in zip(first, rows_left, strict=False):  # this loop is hot: no min, no max
        if reached > start + left:
            reached = start + left
        if reached < start:
            reached = start
        last.append(reached)
    decided = request.num_accepted[level] - 1  # the first row whose logits are wanted
    if reached < goal and reached > decided:  # all of them in one step
        last[depth] = max(decided, first[depth])
    for s in range(depth - 1, -1, -1):
        if first[s] == first[s + 1] and last[s] > last[s + 1]:
            last[s] = last[s + 1]  # segments that run together stay together
    return None if last == first else Plan(request, level, depth, first, last)
