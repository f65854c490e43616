"""When a request would be finished at each tier, by what steps have cost so far. Pure."""

from collections.abc import Sequence

from mfs_trt.scheduler.step_cost import StepCost, StepWork


def seconds_by_tier(
    counts: Sequence[int],
    num_tokens: int,
    tokens_left: int,
    beside: StepWork,
    rows_per_step: int,
    cost: StepCost,
) -> list[float]:
    """Predicted seconds until a request has its last token, of every tier.

    `counts`: computed tokens of the segments that it runs; `num_tokens` are known, `tokens_left` at
    most are to be made. `beside`: what a step computes for others. `rows_per_step`: of this
    request, while it catches up.

    Its segments first compute what they lack, then every step makes a token. Drafts are left out:
    they only make it faster.
    """
    goal = num_tokens - 1  # the last one is computed by the step that makes the next
    behind = [max(0, goal - n) for n in counts] + [goal] * (len(cost.groups) - len(counts))
    seconds = [0.0]
    for tier in range(len(cost.groups)):
        num_steps = -(-max(behind[: tier + 1]) // rows_per_step)
        total = 0.0
        if num_steps:
            chunk = _chunk(beside, behind[: tier + 1], goal, num_steps, cost)
            total = num_steps * cost.predict(chunk)
        # On average its context is longer than now. What is learnt from noisy steps may say that a
        # longer context or a deeper tier costs less; it does not.
        contexts = (num_tokens, num_tokens + tokens_left // 2)
        token_s = max(cost.predict(_token(beside, tier, n, cost)) for n in contexts)
        seconds.append(max(seconds[-1], total + tokens_left * token_s))
    return seconds[1:]


def _token(beside: StepWork, tier: int, context: int, cost: StepCost) -> StepWork:
    """A step that makes a token: one row in every segment."""
    work = StepWork(list(beside.rows), beside.pairs, beside.contexts)
    for s in range(tier + 1):
        work.add(s, context - 1, context, cost.groups[s])
    return work


def _chunk(
    beside: StepWork, behind: Sequence[int], goal: int, num_steps: int, cost: StepCost
) -> StepWork:
    """One of the steps that catch up, an average one."""
    work = StepWork(list(beside.rows), beside.pairs, beside.contexts)
    for s, missing in enumerate(behind):
        if missing:
            num_rows = -(-missing // num_steps)
            last = goal - (missing - num_rows) // 2
            work.add(s, last - num_rows, last, cost.groups[s])
    return work


def decode_work(contexts: Sequence[tuple[int, int]], groups: Sequence[int]) -> StepWork:
    """One row of each request, given as (tier, tokens)."""
    work = StepWork([0] * len(groups))
    for tier, num_tokens in contexts:
        for s in range(tier + 1):
            work.add(s, num_tokens - 1, num_tokens, groups[s])
    return work
