"""Requests that draft, beside others: who drafts and who verifies in a step."""

from types import SimpleNamespace

import pytest

from host_logic import add, decided, make_request, make_scheduler
from mfs_trt.request import PromptRequest


class Fixed:
    """Chooses one length for everybody, and remembers what it was told."""

    def __init__(self, *lengths: int) -> None:
        self._lengths = lengths
        self.seen: list[tuple[int, int, int]] = []

    def choose(self, running) -> None:
        pass

    def lengths(self, request):
        return self._lengths

    def observe(self, request, level, num_drafts, num_accepted) -> None:
        self.seen.append((level, num_drafts, num_accepted))

    def forget(self, request) -> None:
        pass


def make(*lengths: int, **settings):
    scheduler = make_scheduler(num_feature_slots=400, budget=64, **settings)
    scheduler.drafting = Fixed(*lengths)
    return scheduler


def speculating(name: str, *, wanted: int | None = None, levels=(0,), **fields):
    request = make_request(name, 5, tier=2, draft_levels=levels, max_tokens=40, **fields)
    asked = request.prompt_request
    request.prompt_request = PromptRequest(
        name, asked.params, token_ids=asked.token_ids, num_speculative_tokens=wanted
    )
    return request


def step(scheduler) -> dict[str, int]:
    """One step in which every draft stands; level of each request that something is decided for."""
    output = scheduler.schedule()
    names = [name for names in output.sampled for name in names]
    verdicts = {}
    for name in names:
        request, level = scheduler.requests[name], output.levels[name]
        waiting = request.token_ids[request.num_accepted[level] :]
        verdicts[name] = decided(*waiting, 1000)
    scheduler.update(output, verdicts)
    return {name: output.levels[name] for name in names}


def levels_of(scheduler, count: int) -> list[dict[str, int]]:
    return [step(scheduler) for _ in range(count)]


def test_a_round_is_drafts_and_one_verification():
    scheduler = make(3)
    add(scheduler, speculating("a"))
    step(scheduler)  # the prompt
    assert [s["a"] for s in levels_of(scheduler, 8)] == [0, 0, 0, 1, 0, 0, 0, 1]


def test_what_was_verified_is_told_to_whoever_chooses_the_length():
    scheduler = make(3)
    add(scheduler, speculating("a"))
    levels_of(scheduler, 5)
    assert scheduler.drafting.seen == [(0, 3, 3)]


def test_requests_that_draft_verify_in_the_steps_that_run_deep_anyway():
    scheduler = make(3)
    add(scheduler, speculating("a"))
    levels_of(scheduler, 2)  # prompt and one draft
    add(scheduler, make_request("deep", 5, tier=2, arrival=1.0, max_tokens=3))
    step(scheduler)  # the second draft: it was planned before the prompt was admitted
    assert levels_of(scheduler, 2) == [{"a": 1, "deep": 0}] * 2
    assert "deep" not in scheduler.requests
    assert step(scheduler) == {"a": 0}


def test_a_shallow_neighbour_leaves_drafts_alone():
    scheduler = make(3)
    add(scheduler, speculating("a"), make_request("shallow", 5, tier=0, arrival=1.0, max_tokens=30))
    step(scheduler)
    assert [s["a"] for s in levels_of(scheduler, 4)] == [0, 0, 0, 1]


def test_late_and_early_requests_come_to_verify_together():
    scheduler = make(3)
    add(scheduler, speculating("a"))
    levels_of(scheduler, 3)
    add(scheduler, speculating("b", arrival=1.0))
    steps = levels_of(scheduler, 10)[2:]
    assert all(s["a"] == s["b"] for s in steps)


def test_a_length_that_was_asked_for_is_kept_whatever_runs_beside():
    scheduler = make(3)
    add(scheduler, speculating("a", wanted=2), make_request("deep", 5, tier=2, max_tokens=30))
    step(scheduler)
    assert [s["a"] for s in levels_of(scheduler, 6)] == [0, 0, 1, 0, 0, 1]


def test_a_request_that_climbs_back_drafts_again():
    scheduler = make(3)
    add(scheduler, speculating("a"))
    levels_of(scheduler, 2)
    request = scheduler.requests["a"]
    scheduler.switch(request, 0)
    assert request.levels == (0,)
    levels_of(scheduler, 2)
    scheduler.switch(request, 2)
    assert request.levels == (0, 2)
    step(scheduler)  # catches up
    assert [s["a"] for s in levels_of(scheduler, 4)] == [0, 0, 0, 1]


def test_drafts_never_reach_the_token_that_is_not_computed():
    """A chain whose drafts all stand, in an arena that holds just what the request can need."""
    request = speculating("a", levels=(0, 1))  # 5 + 40 tokens, of which 44 are computed
    scheduler = make(2, 2, num_frames=1 + 11 * (1 + 1 + 2))
    add(scheduler, request)
    num_steps = 0
    while not request.is_finished:
        step(scheduler)
        assert request.is_finished or request.num_tokens < request.max_num_tokens
        num_steps += 1
        assert num_steps < 100
    assert request.num_output_tokens == 40


@pytest.mark.parametrize("lengths", [(0,), (0, 0)])
def test_without_drafts_every_step_decodes(lengths):
    scheduler = make(*lengths)
    add(scheduler, speculating("a", levels=tuple(range(len(lengths)))))
    step(scheduler)
    assert [s["a"] for s in levels_of(scheduler, 4)] == [len(lengths)] * 4


def test_prompts_are_paced_by_what_is_left_after_the_first():
    scheduler = make(groups=(1, 1, 1), max_model_len=256)
    cost = SimpleNamespace(
        rows_within=lambda seconds, context: int(seconds), row_seconds=lambda n, context: float(n)
    )
    scheduler.pacing = SimpleNamespace(cost=cost, spare_seconds=lambda *work: 12.0)
    long = [make_request(f"p{i}", 30, tier=2, arrival=float(i)) for i in range(3)]
    add(scheduler, *long)
    assert scheduler.schedule().num_tokens == 12
