"""What is computed twice: counters of rows per segment, on the scheduler alone."""

import pytest

from host_logic import add, decided, make_request, make_scheduler


def run(scheduler, request, until=None) -> None:
    """Step until the request has ended, or has as many tokens as `until`."""
    while request.request_id in scheduler.requests:
        if until is not None and request.num_final_tokens >= until:
            return
        output = scheduler.schedule()
        assert not output.is_empty
        names = [name for names in output.sampled for name in names]
        scheduler.update(output, {name: decided(1000) for name in names})
        scheduler.kv_cache.check_integrity()


def make(features: int = 4096, **settings):
    sizes = {"groups": (1, 1, 1), "max_model_len": 2048, "budget": 64, "block_size": 8}
    return make_scheduler(num_feature_slots=features, **{**sizes, **settings})


def test_escalation_of_a_long_context_recomputes_no_row_of_the_lower_segments():
    scheduler = make()
    request = make_request(num_prompt_tokens=1024, tier=0, max_tokens=20)
    add(scheduler, request)
    run(scheduler, request, until=1030)
    before = list(scheduler.num_rows)
    assert before == [1029, 0, 0]
    scheduler.switch(request, 2)
    run(scheduler, request)
    assert scheduler.num_rows[0] - before[0] == 1043 - 1029  # each new token once
    assert scheduler.num_rows[1:] == [1043, 1043]
    assert scheduler.num_rows_again == [0, 0, 0]


def test_escalation_without_features_runs_the_lower_rows_again_and_counts_them():
    scheduler = make(features=0)
    request = make_request(num_prompt_tokens=100, tier=0, max_tokens=20)
    add(scheduler, request)
    run(scheduler, request, until=105)
    scheduler.switch(request, 1)
    run(scheduler, request)
    assert scheduler.num_rows_again == [104, 0, 0]
    assert scheduler.num_rows == [119 + 104, 119, 0]


def test_switching_down_frees_the_deeper_blocks_at_once():
    scheduler = make()
    request = make_request(num_prompt_tokens=40, tier=2, max_tokens=20)
    add(scheduler, request)
    run(scheduler, request, until=42)
    assert scheduler.kv_cache.num_used_frames == 3 * 6
    scheduler.switch(request, 0)
    assert scheduler.kv_cache.num_used_frames == 6
    run(scheduler, request)
    assert scheduler.kv_cache.num_used_frames == 0


@pytest.mark.parametrize("tiers", [(0, 2, 0, 2), (2, 0, 2, 0), (0, 1, 2, 1)])
def test_a_chat_whose_tier_changes_each_turn_computes_only_new_tokens(tiers):
    scheduler = make()
    history: list[int] = list(range(2000, 2064))
    for turn, tier in enumerate(tiers):
        history += range(3000 + 100 * turn, 3000 + 100 * turn + 16)  # what the user says
        request = make_request(f"turn{turn}", prompt=history, tier=tier, max_tokens=8,
                               reuse_prefix=True)  # fmt: skip
        add(scheduler, request)
        before = list(scheduler.num_rows)
        run(scheduler, request)
        rows = [b - a for a, b in zip(before, scheduler.num_rows, strict=True)]
        num_new = 16 + 8 + (64 if turn == 0 else 0)
        # A block that was not full, and the token that was sampled last, are computed again.
        assert rows[0] <= num_new + 8
        assert scheduler.num_rows_again == [0, 0, 0]
        history = request.token_ids[:]


def test_a_prompt_of_a_deep_tier_serves_a_shallow_one_whole():
    scheduler = make()
    deep = make_request("deep", num_prompt_tokens=64, tier=2, max_tokens=1, reuse_prefix=True)
    add(scheduler, deep)
    run(scheduler, deep)
    shallow = make_request("shallow", num_prompt_tokens=65, tier=0, max_tokens=1, reuse_prefix=True)
    add(scheduler, shallow)
    before = scheduler.num_rows[0]
    run(scheduler, shallow)
    assert scheduler.num_rows[0] - before == 1
    assert shallow.num_reused_blocks == 8


def test_a_prompt_is_shared_while_its_request_still_runs():
    scheduler = make()
    first = make_request("first", num_prompt_tokens=64, tier=0, max_tokens=50, reuse_prefix=True)
    add(scheduler, first)
    run(scheduler, first, until=66)
    second = make_request("second", num_prompt_tokens=64, tier=0, max_tokens=1, reuse_prefix=True)
    add(scheduler, second)
    run(scheduler, second)
    assert second.num_reused_blocks == 7  # of 8; the last token is computed in any case
    assert first.request_id in scheduler.requests


@pytest.mark.parametrize("other", [{"cache_salt": "x"}, {"reuse_prefix": False}])
def test_another_salt_or_no_wish_to_share_finds_nothing(other):
    scheduler = make()
    first = make_request("first", num_prompt_tokens=64, tier=1, max_tokens=1, reuse_prefix=True)
    add(scheduler, first)
    run(scheduler, first)
    settings = {"reuse_prefix": True, **other}
    second = make_request("second", num_prompt_tokens=64, tier=1, max_tokens=1, **settings)
    add(scheduler, second)
    run(scheduler, second)
    assert second.num_reused_blocks == 0 and scheduler.num_rows == [128, 128, 0]


def test_preempted_requests_resume_from_what_the_cache_still_holds():
    scheduler = make(num_frames=1 + 3 * 10, features=0)
    victim = make_request("victim", num_prompt_tokens=40, tier=2, max_tokens=20, arrival=1.0,
                          reuse_prefix=True)  # fmt: skip
    add(scheduler, victim)
    run(scheduler, victim, until=42)
    urgent = make_request("urgent", prompt=range(500, 530), tier=0, max_tokens=30, priority=1,
                          reuse_prefix=True)  # fmt: skip
    add(scheduler, urgent)
    run(scheduler, urgent)
    run(scheduler, victim)
    assert victim.num_output_tokens == 20
    wasted = scheduler.num_rows[0] - (59 + 59)
    assert wasted <= 8 * (victim.num_preemptions > 0)


def test_evicted_content_is_the_deepest_and_last_first():
    scheduler = make(num_frames=1 + 12, features=0)
    request = make_request("a", num_prompt_tokens=32, tier=2, max_tokens=1, reuse_prefix=True)
    add(scheduler, request)
    run(scheduler, request)
    pool = scheduler.kv_cache.pool
    assert pool.num_cached_frames == 12
    block = pool.allocate(4)  # all that segment 2 left behind
    again = make_request("b", num_prompt_tokens=32, tier=1, max_tokens=1, reuse_prefix=True)
    scheduler.kv_cache.open(again)
    assert again.num_computed_tokens == [24, 24]
    scheduler.kv_cache.close(again)
    pool.release(block)
