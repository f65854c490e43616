"""The scheduler: which tokens a step computes, who waits, who makes way, who is finished."""

import pytest

from host_logic import add, computed_tokens, make_request, make_scheduler, run_step
from mfs_trt.errors import RequestTooLargeError
from mfs_trt.request import FinishReason, RequestStatus
from mfs_trt.scheduler import scheduler as scheduler_module


def names(requests) -> list[str]:
    return [r.request_id for r in requests]


# -- the budget ----------------------------------------------------------------------------------


def test_long_prompt_is_computed_in_chunks_of_the_budget():
    scheduler = make_scheduler(budget=4)
    add(scheduler, make_request("r", 10, tier=1))
    steps = [run_step(scheduler) for _ in range(3)]
    assert [computed_tokens(s)["r"] for s in steps] == [(4, 4), (8, 8), (10, 10)]
    assert [s.input_ids.tolist() for s in steps] == [
        [100, 101, 102, 103],
        [104, 105, 106, 107],
        [108, 109],
    ]
    assert [s.sampled for s in steps] == [((), (), ()), ((), (), ()), ((), ("r",), ())]


def test_decoding_requests_come_before_a_long_prompt():
    scheduler = make_scheduler(budget=4)
    add(scheduler, make_request("prompt", 20, arrival=0.0), make_request("d", 1, arrival=1.0))
    run_step(scheduler)  # the prompt alone fills the step
    run_step(scheduler)
    assert "d" not in computed_tokens(run_step(scheduler))
    scheduler = make_scheduler(budget=4)
    add(scheduler, make_request("d", 1, arrival=1.0))
    run_step(scheduler)
    add(scheduler, make_request("prompt", 20, arrival=0.0))
    for total in (3, 6, 9):
        assert computed_tokens(run_step(scheduler)) == {
            "d": (total // 3 + 1,),
            "prompt": (total,),
        }


def test_budget_counts_the_rows_of_the_first_segment_for_all_tiers():
    scheduler = make_scheduler(budget=6)
    add(scheduler, make_request("deep", 4, tier=2), make_request("shallow", 4, arrival=1.0))
    output = run_step(scheduler)
    assert computed_tokens(output) == {"deep": (4, 4, 4), "shallow": (2,)}
    assert output.num_tokens == 6


# -- tiers ---------------------------------------------------------------------------------------


def test_tiers_share_a_step_deepest_first():
    scheduler = make_scheduler()
    for tier in (0, 2, 1):
        add(scheduler, make_request(f"t{tier}", 2, tier=tier, arrival=float(tier)))
    output = run_step(scheduler)
    rows = [[] if s is None else s.rows.tolist() for s in output.segments]
    assert len(rows[0]) == 3
    assert rows[1] == rows[0][:2] and rows[2] == rows[0][:1]
    assert output.sampled == (("t0",), ("t1",), ("t2",))
    assert [s.exit_items.tolist() for s in output.segments] == [[2], [1], [0]]
    assert list(computed_tokens(output)) == ["t2", "t1", "t0"]


def test_segment_that_no_tier_reaches_has_no_items():
    scheduler = make_scheduler()
    add(scheduler, make_request("r", 3, tier=0))
    assert run_step(scheduler).segments[1:] == (None, None)


# -- memory: who makes way -----------------------------------------------------------------------


def crowded():
    """Seven frames of 4 tokens, all held: `first` (16 tokens) needs one more in the next step.

    `second` has been set aside for four steps, for it needs one more too.
    """
    scheduler = make_scheduler(num_frames=1 + 7, groups=(1,), block_size=4)
    first = make_request("first", 8, arrival=0.0, max_tokens=12)
    second = make_request("second", 9, arrival=1.0, max_tokens=8)
    add(scheduler, first)
    run_step(scheduler)
    add(scheduler, second)
    for _ in range(8):
        assert run_step(scheduler).preempted == ()
    assert (first.num_computed_tokens, second.num_computed_tokens) == ([16], [12])
    return scheduler, first, second


def test_request_that_outgrows_memory_takes_that_of_the_last_in_rank():
    scheduler, first, second = crowded()
    output = run_step(scheduler)
    assert output.preempted == ("second",)
    assert computed_tokens(output) == {"first": (17,)}
    assert second.status is RequestStatus.WAITING
    assert second.num_computed_tokens == [0] and second.row == -1
    assert second.num_preemptions == scheduler.num_preemptions == 1


def test_request_never_takes_the_memory_of_a_higher_rank():
    scheduler, first, second = crowded()
    assert scheduler.num_preemptions == 0
    assert second.num_tokens == 13  # it could go on, were there memory
    assert names(scheduler.running) == ["first", "second"]


def test_preempted_request_keeps_its_rank_and_is_not_passed():
    scheduler, first, second = crowded()
    # One frame for it, one in reserve: it would fit beside `first`, and `second` would not.
    add(scheduler, make_request("behind", 1, arrival=2.0, max_tokens=1))
    assert set(computed_tokens(run_step(scheduler))) == {"first"}
    assert scheduler.kv_cache.pool.num_free_frames == 2
    assert set(computed_tokens(run_step(scheduler))) == {"first"}
    assert names(scheduler.waiting) == ["second", "behind"]


def test_nobody_behind_takes_what_a_request_has_just_lost_to_a_higher_priority():
    scheduler = make_scheduler(num_frames=1 + 4, groups=(1,), block_size=4)
    add(scheduler, make_request("low", 12, max_tokens=2))
    run_step(scheduler)
    add(scheduler, make_request("high", 4, arrival=1.0, priority=1, max_tokens=2))
    add(scheduler, make_request("behind", 1, arrival=2.0))
    output = run_step(scheduler)
    assert output.preempted == ("low",)
    assert set(computed_tokens(output)) == {"high"}  # although two frames are free


def test_preempted_request_resumes_with_the_tokens_it_had():
    scheduler, first, second = crowded()
    run_step(scheduler)
    scheduler.finish(first, FinishReason.ABORT)
    output = run_step(scheduler)
    assert second.num_output_tokens == 5
    assert computed_tokens(output) == {"second": (13,)}  # the prompt of 9 and 4 tokens, again
    assert output.input_ids.tolist() == [*second.prompt_token_ids, *[1000] * 4]


def test_admission_leaves_a_block_for_each_running_request():
    scheduler = make_scheduler(num_frames=1 + 2, groups=(1,), block_size=4)
    add(scheduler, make_request("first", 3, max_tokens=4))
    run_step(scheduler)
    add(scheduler, make_request("second", 1, arrival=1.0, max_tokens=1))
    assert set(computed_tokens(run_step(scheduler))) == {"first"}


def test_last_in_rank_makes_way_for_a_higher_priority():
    scheduler = make_scheduler(max_num_seqs=2)
    add(scheduler, make_request("early", 2), make_request("late", 2, arrival=1.0))
    run_step(scheduler)
    add(scheduler, make_request("high", 2, arrival=2.0, priority=1))
    assert run_step(scheduler).preempted == ("late",)


@pytest.mark.parametrize("scarce", ["seat", "memory"])
def test_higher_priority_takes_the_place_of_a_lower_one(scarce):
    frames, seats = (100, 1) if scarce == "seat" else (1 + 2, 8)
    scheduler = make_scheduler(num_frames=frames, max_num_seqs=seats, groups=(1,), block_size=4)
    add(scheduler, make_request("low", 6, max_tokens=2))
    run_step(scheduler)
    add(scheduler, make_request("high", 6, arrival=9.0, priority=1, max_tokens=2))
    output = run_step(scheduler)
    assert output.preempted == ("low",)
    assert set(computed_tokens(output)) == {"high"}


@pytest.mark.parametrize("scarce", ["seat", "memory"])
def test_equal_priority_waits_for_its_turn(scarce):
    frames, seats = (100, 1) if scarce == "seat" else (1 + 2, 8)
    scheduler = make_scheduler(num_frames=frames, max_num_seqs=seats, groups=(1,), block_size=4)
    add(scheduler, make_request("late", 6, arrival=9.0, max_tokens=2))
    run_step(scheduler)
    add(scheduler, make_request("early", 6, arrival=0.0, max_tokens=2))
    output = run_step(scheduler)
    assert output.preempted == ()
    assert set(computed_tokens(output)) == {"late"}


def test_lower_priority_keeps_its_place_when_giving_it_up_would_not_be_enough():
    scheduler = make_scheduler(num_frames=1 + 4, groups=(1,), block_size=4)
    add(scheduler, make_request("equal", 4, priority=1, max_tokens=8))
    run_step(scheduler)
    add(scheduler, make_request("low", 2, arrival=1.0))
    run_step(scheduler)
    assert names(scheduler.running) == ["equal", "low"]
    add(scheduler, make_request("high", 12, arrival=2.0, priority=1, max_tokens=2))
    output = run_step(scheduler)
    assert output.preempted == ()
    assert set(computed_tokens(output)) == {"equal", "low"}


# -- admission -----------------------------------------------------------------------------------


def test_request_that_does_not_fit_now_is_set_aside_and_passed():
    scheduler = make_scheduler(num_frames=1 + 6, groups=(1,), block_size=4)
    add(scheduler, make_request("running", 8, max_tokens=4))
    run_step(scheduler)
    add(scheduler, make_request("large", 16, arrival=1.0), make_request("small", 4, arrival=2.0))
    assert set(computed_tokens(run_step(scheduler))) == {"running", "small"}
    assert names(scheduler.waiting) == ["large"]


def test_request_that_was_passed_often_enough_is_passed_no_more(monkeypatch):
    monkeypatch.setattr(scheduler_module, "MAX_PASSES", 3)
    scheduler = make_scheduler(num_frames=1 + 6, groups=(1,), block_size=4)
    running = make_request("running", 4, max_tokens=20)
    add(scheduler, running)
    run_step(scheduler)
    add(scheduler, make_request("large", 20, arrival=1.0, max_tokens=4))
    started = []
    for i in range(5):
        add(scheduler, make_request(f"small{i}", 1, arrival=2.0 + i, max_tokens=1))
        started += set(computed_tokens(run_step(scheduler))) - {"running"}
    assert started == ["small0", "small1", "small2"]
    scheduler.finish(running, FinishReason.ABORT)
    assert "large" in computed_tokens(run_step(scheduler))


def test_seats_are_never_exceeded_and_go_on_to_the_next():
    scheduler = make_scheduler(max_num_seqs=2)
    add(scheduler, *(make_request(f"r{i}", 2, arrival=float(i), max_tokens=2) for i in range(3)))
    assert set(computed_tokens(run_step(scheduler))) == {"r0", "r1"}
    assert set(computed_tokens(run_step(scheduler))) == {"r0", "r1"}
    assert set(computed_tokens(run_step(scheduler))) == {"r2"}


def test_request_longer_than_the_context_is_refused_with_both_numbers():
    scheduler = make_scheduler(max_model_len=16)
    scheduler.check_fits(make_request(num_prompt_tokens=10, max_tokens=6))
    with pytest.raises(RequestTooLargeError, match=r"17 tokens.* max_model_len of 16"):
        scheduler.check_fits(make_request(num_prompt_tokens=10, max_tokens=7))


def test_request_larger_than_the_arena_is_refused_with_both_numbers():
    scheduler = make_scheduler(num_frames=1 + 12, groups=(1, 1, 2), block_size=4)
    scheduler.check_fits(make_request(num_prompt_tokens=8, max_tokens=5, tier=2))
    with pytest.raises(RequestTooLargeError, match=r"needs 16 KV frames.* arena's 12"):
        scheduler.check_fits(make_request(num_prompt_tokens=8, max_tokens=6, tier=2))
    scheduler.check_fits(make_request(num_prompt_tokens=8, max_tokens=6, tier=0))


# -- ends ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["waiting", "prefill", "decode", "preempted"])
def test_cancelled_request_leaves_nothing_behind(phase):
    scheduler = make_scheduler(budget=4, max_num_seqs=1)
    request = make_request("r", 6, tier=2)
    add(scheduler, request)
    for _ in range({"waiting": 0, "prefill": 1, "decode": 3, "preempted": 3}[phase]):
        run_step(scheduler)
    if phase == "preempted":
        other = make_request("other", 1, priority=1, max_tokens=1)
        add(scheduler, other)
        assert run_step(scheduler).preempted == ("r",)
    scheduler.finish(request, FinishReason.ABORT)
    assert request.is_finished and request.finish_reason is FinishReason.ABORT
    assert not scheduler.has_requests and not scheduler.running and not len(scheduler.waiting)
    assert scheduler.kv_cache.num_used_frames == 0
    scheduler.kv_cache.check_integrity()
    add(scheduler, make_request("r", 2))  # the id and the seat are free
    assert set(computed_tokens(run_step(scheduler))) == {"r"}


def test_end_token_finishes_with_stop_and_frees():
    scheduler = make_scheduler()
    request = make_request(end_token_ids=[7], max_tokens=5)
    add(scheduler, request)
    run_step(scheduler, token_id=6)
    assert not request.is_finished
    run_step(scheduler, token_id=7)
    assert request.finish_reason is FinishReason.STOP
    assert request.output_token_ids == [6, 7]
    assert scheduler.kv_cache.num_used_frames == 0


def test_last_token_allowed_finishes_with_length():
    scheduler = make_scheduler()
    request = make_request(max_tokens=2)
    add(scheduler, request)
    run_step(scheduler)
    assert not request.is_finished
    run_step(scheduler)
    assert request.finish_reason is FinishReason.LENGTH
    assert not scheduler.has_requests


def test_end_token_as_last_token_allowed_is_a_stop():
    scheduler = make_scheduler()
    request = make_request(max_tokens=1, end_token_ids=[7])
    add(scheduler, request)
    run_step(scheduler, token_id=7)
    assert request.finish_reason is FinishReason.STOP


def test_end_token_before_min_tokens_does_not_finish():
    scheduler = make_scheduler()
    request = make_request(min_tokens=2, end_token_ids=[7])
    add(scheduler, request)
    run_step(scheduler, token_id=7)
    assert not request.is_finished
    run_step(scheduler, token_id=7)
    assert request.finish_reason is FinishReason.STOP
