"""The one rule, feature by feature: counts of computed tokens per segment chase the known ones.

One test for each row of the design's table: what the feature is in counts, with no second path. On
the scheduler alone, where a step is what it says that it computes.
"""

from dataclasses import replace

from host_logic import add, computed_tokens, decided, make_request, make_scheduler, run_step
from mfs_trt.request import FinishReason

GROUPS = (1, 1, 1)


def make(**settings):
    return make_scheduler(groups=GROUPS, **{"num_feature_slots": 256, **settings})


def gaps(request) -> list[int]:
    """Known tokens less computed ones, per segment."""
    return [len(request.token_ids) - count for count in request.num_computed_tokens]


def rows_of(output) -> list[int]:
    """Tokens that a step computes, per segment."""
    return [0 if s is None else s.num_rows for s in output.segments]


def test_prefill_chunks_and_decode_are_gaps_of_different_size():
    scheduler = make(budget=8)
    request = make_request(num_prompt_tokens=19, tier=2, max_tokens=3)
    add(scheduler, request)
    seen = []
    while not request.is_finished:
        before = gaps(request)
        rows = rows_of(run_step(scheduler))
        assert rows == [min(gap, 8) for gap in before]
        seen.append(rows[0])
    assert seen == [8, 8, 3, 1, 1]  # two chunks, the rest of the prompt, decodes


def test_tiers_share_a_batch_in_each_segment_that_they_have():
    scheduler = make()
    add(scheduler, *(make_request(f"t{t}", 5, tier=t, arrival=float(t)) for t in range(3)))
    assert rows_of(run_step(scheduler)) == [15, 10, 5]
    assert rows_of(run_step(scheduler)) == [3, 2, 1]  # deeper segments simply have fewer rows


def test_prefix_caching_starts_counts_above_zero_for_every_segment_that_is_there():
    scheduler, found = make(), {}
    for name, tier in (("shallow", 0), ("deep", 2), ("shallow again", 0)):
        request = make_request(name, 17, tier=tier, max_tokens=1, reuse_prefix=True)
        add(scheduler, request)
        found[name] = rows_of(run_step(scheduler))
        assert request.is_finished
    assert found["shallow"] == [17, 0, 0]
    assert found["deep"] == [1, 17, 17]  # four blocks of segment 0 are there, features as well
    assert found["shallow again"] == [1, 0, 0]
    assert scheduler.num_rows_again == [0, 0, 0]


def test_a_switch_up_makes_deeper_segments_chase_from_zero_and_no_lower_row_runs_again():
    scheduler = make()
    request = make_request(num_prompt_tokens=10, tier=0, max_tokens=8)
    add(scheduler, request)
    for _ in range(3):
        run_step(scheduler)
    assert gaps(request) == [1]
    scheduler.switch(request, 2)
    assert gaps(request) == [1, 13, 13]
    assert rows_of(run_step(scheduler)) == [1, 13, 13]
    assert gaps(request) == [1, 1, 1] and scheduler.num_rows_again == [0, 0, 0]


def test_a_switch_down_ends_the_chase_of_deeper_segments_and_frees_their_blocks():
    scheduler = make()
    request = make_request(num_prompt_tokens=10, tier=2, max_tokens=8)
    add(scheduler, request)
    run_step(scheduler)
    held = scheduler.kv_cache.num_used_frames
    scheduler.switch(request, 0)
    assert gaps(request) == [1]
    assert scheduler.kv_cache.num_used_frames == held // 3
    assert rows_of(run_step(scheduler)) == [1, 0, 0]


def speculate(scheduler, request, *steps) -> list[list[int]]:
    """One step for each entry, which says what the exit decides; rows per segment of each."""
    rows = []
    for token_ids in steps:
        output = scheduler.schedule()
        rows.append(rows_of(output))
        scheduler.update(output, {request.request_id: decided(*token_ids)})
    return rows


def drafting(levels, num_drafts: int):
    request = make_request(num_prompt_tokens=6, tier=2, max_tokens=20, draft_levels=levels)
    request.prompt_request = replace(request.prompt_request, num_speculative_tokens=num_drafts)
    return request


def test_drafts_let_lower_segments_run_ahead_and_a_rejection_lowers_the_counts():
    scheduler = make()
    request = drafting((0,), num_drafts=3)
    add(scheduler, request)
    rows = speculate(scheduler, request, [50], [1], [2], [3])
    assert rows == [[6, 6, 6], [1, 0, 0], [1, 0, 0], [1, 0, 0]]
    assert gaps(request) == [1, 4, 4]  # three drafts ahead, and the token before them
    # One batch of four rows for the segments that are behind, of which the last one is new below.
    assert speculate(scheduler, request, [1, 9]) == [[1, 4, 4]]
    assert request.output_token_ids == [50, 1, 9]  # one draft stood, one was replaced
    assert gaps(request) == [1, 1, 1]


def test_a_chain_of_tiers_is_the_same_with_more_than_one_level():
    scheduler = make()
    request = drafting((0, 1), num_drafts=2)
    add(scheduler, request)
    speculate(scheduler, request, [50])
    assert request.num_accepted == [7, 7, 7]
    drafted = speculate(scheduler, request, [1], [2])
    assert (drafted, request.num_accepted) == ([[1, 0, 0], [1, 0, 0]], [9, 7, 7])
    # The middle tier catches up with two drafts and adds a token: three stand there, as drafts.
    assert speculate(scheduler, request, [1, 2, 3]) == [[1, 3, 0]]
    assert request.num_accepted == [10, 10, 7] and gaps(request) == [1, 1, 4]
    assert speculate(scheduler, request, [1, 2, 9]) == [[1, 1, 4]]
    assert request.output_token_ids == [50, 1, 2, 9] and request.num_accepted == [10, 10, 10]
    assert gaps(request) == [1, 1, 1]


def test_preemption_takes_the_counts_back_to_zero_and_the_same_chase_begins_again():
    scheduler = make(num_frames=1 + 12)
    request = make_request("low", 10, tier=2, max_tokens=6)
    add(scheduler, request)
    for _ in range(2):
        run_step(scheduler)
    high = make_request("high", 10, tier=2, max_tokens=2, priority=1, arrival=1.0)
    add(scheduler, high)
    assert run_step(scheduler).preempted == ("low",)
    assert gaps(request) == [12, 12, 12] and request.output_token_ids == [1000, 1000]
    scheduler.finish(high, FinishReason.ABORT)
    output = run_step(scheduler)
    assert rows_of(output) == [12, 12, 12] and set(computed_tokens(output)) == {"low"}
    assert gaps(request) == [1, 1, 1]
