"""Plans of a step → `SchedulerOutput`: the work items of each segment as arrays. Pure."""

from collections.abc import Mapping, Sequence

import numpy as np

from mfs_trt.scheduler.output import SchedulerOutput, SegmentItems
from mfs_trt.scheduler.plan import Plan


def assemble(
    plans: Sequence[Plan],
    saved_from: Sequence[Mapping[str, int]],
    preempted: Sequence[str],
    num_segments: int,
) -> SchedulerOutput:
    """`saved_from`: per boundary, first token whose feature is kept, of requests that keep some.

    Deepest first: a deeper segment's rows are mostly the first rows of the one below.
    """
    ordered = sorted(plans, key=lambda p: -p.depth)
    segments: list[SegmentItems | None] = []
    sampled: list[tuple[str, ...]] = []
    for s in range(num_segments):
        items = [p for p in ordered if s <= p.depth and p.last[s] > p.first[s]]
        exits = [(i, n) for i, p in enumerate(items) if p.depth == s and (n := p.num_exit_rows)]
        sampled.append(tuple([items[i].request.request_id for i, _ in exits]))
        kept = saved_from[s] if s < len(saved_from) else {}
        segments.append(_segment_items(items, s, exits, kept) if items else None)
    input_ids: list[int] = []
    for plan in ordered:
        input_ids += plan.request.token_ids[plan.first[0] : plan.last[0]]
    return SchedulerOutput(
        segments=tuple(segments),
        input_ids=np.array(input_ids, np.int32),
        computed=tuple([(p.request.request_id, p.counts) for p in ordered]),
        sampled=tuple(sampled),
        levels={p.request.request_id: p.level for p in ordered},
        preempted=tuple(preempted),
    )


def _segment_items(
    items: Sequence[Plan], s: int, exits: Sequence[tuple[int, int]], kept: Mapping[str, int]
) -> SegmentItems:
    last = np.array([p.last[s] for p in items], np.int32)
    saved = last
    if kept:
        saved = last.copy()
        for i, plan in enumerate(items):
            saved[i] = kept.get(plan.request.request_id, saved[i])
    exit_table = np.array(exits, np.int32).reshape(-1, 2)
    return SegmentItems(
        rows=np.array([p.request.row for p in items], np.int32),
        first_tokens=np.array([p.first[s] for p in items], np.int32),
        last_tokens=last,
        stored_from=np.array([p.request.num_computed_tokens[s] for p in items], np.int32),
        saved_from=saved,
        exit_items=exit_table[:, 0],
        exit_counts=exit_table[:, 1],
    )
