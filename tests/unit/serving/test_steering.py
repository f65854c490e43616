"""Steering: policies move running requests, and the text is what the tiers give alone."""

import pytest

from host_logic import add, make_request, make_scheduler, run_step
from known_cost import KnownCost
from mfs_trt.errors import RequestTooLargeError
from mfs_trt.request import FinishReason, PromptRequest, Request
from mfs_trt.sampling_params import SamplingParams
from mfs_trt.scheduler.pacing import Pacing
from mfs_trt.scheduler.policies import CALM_STEPS, MIN_DWELL, MIN_TOKENS, PRESSED_STEPS
from mfs_trt.scheduler.step_cost import MIN_STEPS, StepCost
from mfs_trt.scheduler.tier_policy import TierPolicy
from mfs_trt.serving.core import EngineCore
from mfs_trt.serving.steering import REVIEW_EVERY, Steering, SwitchCounter
from tiny import drain, submit, tiny_engine, tiny_family, tiny_model

FAMILY = tiny_family((2, 3, 4))  # each of them deep enough to answer
MODEL = tiny_model(FAMILY)
PROMPT = [3, 1, 4, 1, 5]
ALWAYS, NEVER = 0.0, -1e3  # cascade thresholds


def make_core(**sizes) -> EngineCore:
    return EngineCore(tiny_engine(MODEL, num_feature_slots=200, **sizes), tokenizer=None)


def request(name="r", max_tokens=20, **fields) -> PromptRequest:
    params = {"max_tokens": max_tokens, "end_id": -1, **fields.pop("params", {})}
    return PromptRequest(name, SamplingParams(**params), token_ids=PROMPT, **fields)


def of(events, name="r"):
    """Tokens of a request, and the tier of each."""
    mine = [e for e in events if e.request_id == name]
    return [t for e in mine for t in e.token_ids], [e.tier for e in mine for _ in e.token_ids]


# -- cascade -------------------------------------------------------------------------------------


def test_an_unsure_cascade_climbs_tier_by_tier_and_one_that_is_sure_stays():
    core = make_core()
    submit(core, request("unsure", tier_policy="cascade", cascade_threshold=ALWAYS))
    submit(core, request("sure", tier_policy="cascade", cascade_threshold=NEVER))
    events = drain(core)
    expected = ["t0"] * MIN_TOKENS + ["t1"] * MIN_TOKENS + ["t2"] * (20 - 2 * MIN_TOKENS)
    assert of(events, "unsure")[1] == expected
    assert of(events, "sure")[1] == ["t0"] * 20
    assert core.num_tier_switches == {("cascade", "up"): 2}


def test_a_cascade_goes_no_higher_than_its_bound():
    core = make_core()
    fields = {"max_tier": "t1", "cascade_threshold": ALWAYS}
    submit(core, request(tier_policy="cascade", **fields))
    assert of(drain(core))[1] == ["t0"] * MIN_TOKENS + ["t1"] * (20 - MIN_TOKENS)


def test_a_cascade_judges_by_the_log_probabilities_that_the_caller_could_ask_for():
    """Its threshold just under, and just above, the mean of the first tokens that count."""
    core = make_core()
    submit(core, request(max_tokens=MIN_TOKENS, tier="t0", params={"return_log_probs": True}))
    mean = drain(core)[-1].cumulative_log_prob / MIN_TOKENS
    for asks in (True, False):
        for threshold, num_tiers in ((mean - 1e-3, 1), (mean + 1e-3, 2)):
            core = make_core()
            submit(
                core,
                request(
                    max_tokens=MIN_TOKENS + 1,
                    max_tier="t1",
                    tier_policy="cascade",
                    cascade_threshold=threshold,
                    params={"return_log_probs": asks},
                ),
            )
            assert len(set(of(drain(core))[1])) == num_tiers


def test_text_before_an_escalation_is_the_lower_tiers_and_after_it_that_of_a_switch_by_hand():
    core = make_core()
    submit(core, request(tier_policy="cascade", max_tier="t1", cascade_threshold=ALWAYS))
    escalated, tiers = of(drain(core))
    low = make_core()
    submit(low, request(tier="t0"))
    assert escalated[:MIN_TOKENS] == of(drain(low))[0][:MIN_TOKENS]
    by_hand = make_core()
    submit(by_hand, request(tier="t0"))
    events = [e for _ in range(MIN_TOKENS) for e in by_hand.step()]
    by_hand.switch_tier("r", "t1")
    assert of(events + drain(by_hand)) == (escalated, tiers)


def test_an_escalation_computes_no_token_again_in_the_segments_that_ran():
    core = make_core()
    submit(core, request(tier_policy="cascade", cascade_threshold=ALWAYS))
    drain(core)
    num_tokens = len(PROMPT) + 20 - 1  # the last one is never computed
    assert core.scheduler.num_rows == [num_tokens] * 3
    assert core.scheduler.num_rows_again == [0, 0, 0]


# -- load ----------------------------------------------------------------------------------------


class Host:
    """A scheduler and its steering; a step takes no time and every exit samples some token."""

    def __init__(self, num_seats: int, cost: StepCost | None = None) -> None:
        self.pacing = None if cost is None else Pacing(cost)
        self.scheduler = make_scheduler(max_num_seqs=num_seats, max_model_len=256, budget=256)
        self.num_switches = SwitchCounter()
        self.steering = Steering(self.scheduler, self.pacing, self.num_switches)
        self.tiers: dict[str, list[int]] = {}  # per request, the tier of each step that it ran in
        self.now_s = 0.0

    def add(self, name: str, policy: str = "explicit", *, low: int = 0, **fields) -> Request:
        tier = fields.pop("tier", 2)
        request = make_request(name, tier=tier, max_tokens=fields.pop("max_tokens", 200), **fields)
        add(self.scheduler, request)
        self.steering.add(request, TierPolicy(policy, tier, low, 2), self.now_s)
        return request

    def add_queue(self, count: int = 4) -> list[Request]:
        """Requests of the lowest tier that nothing moves."""
        return [self.add(f"q{len(self.scheduler.requests)}", tier=0) for _ in range(count)]

    def end(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.finish(request, FinishReason.ABORT)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            at = {name: r.tier for name, r in self.scheduler.requests.items()}
            for name, _ in run_step(self.scheduler).computed:
                self.tiers.setdefault(name, []).append(at[name])
            self.steering.after_step((), self.now_s)


def test_load_gives_up_tiers_under_a_queue_and_takes_them_back_when_it_drains():
    host = Host(num_seats=1)
    host.add("a", "load")
    queue = host.add_queue()
    host.step(PRESSED_STEPS + MIN_DWELL + 5)
    assert host.tiers["a"] == [2] * PRESSED_STEPS + [1] * MIN_DWELL + [0] * 5
    host.end(*queue)
    host.tiers.clear()
    host.step(CALM_STEPS + MIN_DWELL + 5)
    assert host.tiers["a"] == [0] * CALM_STEPS + [1] * MIN_DWELL + [2] * 5
    assert host.num_switches == {("load", "down"): 2, ("load", "up"): 2}


def test_load_keeps_to_a_requests_own_bounds_and_moves_no_other():
    host = Host(num_seats=2)
    host.add("narrow", "load", low=1)
    host.add("fixed")
    host.add_queue()
    host.step(100)
    assert set(host.tiers["narrow"]) == {2, 1}
    assert set(host.tiers["fixed"]) == {2}


def test_a_request_that_comes_under_load_starts_low_and_those_that_climb_do_so_a_step_apart():
    host = Host(num_seats=2)
    host.add("early", "load", low=1)
    queue = host.add_queue()
    host.step(PRESSED_STEPS)
    late = host.add("late", "load", low=1)
    assert late.tier == 1
    host.end(*queue)
    host.tiers.clear()
    host.step(CALM_STEPS + 5)
    num_low = {name: tiers.count(1) for name, tiers in host.tiers.items()}
    assert num_low == {"early": CALM_STEPS, "late": CALM_STEPS + 1}
    assert host.tiers["late"][-1] == 2


def test_when_nobody_watched_the_queue_the_next_request_starts_high():
    host = Host(num_seats=1)
    first = host.add("first", "load")
    host.add_queue(2)
    host.step(PRESSED_STEPS)
    assert first.tier == 1
    host.end(first)
    assert host.add("second", "load").tier == 2


# -- deadline ------------------------------------------------------------------------------------


def paced_host(num_steps: int = MIN_STEPS) -> Host:
    """Believed from the start: a second for each segment that runs."""
    return Host(num_seats=4, cost=KnownCost((1, 1, 2), num_steps=num_steps))


@pytest.mark.parametrize(
    ("deadline_s", "tier"), [(1e4, 2), (75, 2), (65, 1), (50, 1), (43, 0), (1, 0)]
)
def test_a_deadline_decides_where_a_request_starts(deadline_s, tier):
    """20 tokens after a prompt: about 21, 42 and 63 seconds, and a tenth in reserve."""
    request = paced_host().add("r", "deadline", deadline_time_s=float(deadline_s), max_tokens=20)
    assert request.tier == tier


def test_a_deadline_that_comes_near_moves_a_running_request_down_and_it_climbs_back():
    host = paced_host()
    request = host.add("r", "deadline", deadline_time_s=1e4)
    host.step()
    host.pacing.cost.segment_s = 100.0  # the machine turns out slower
    host.step(REVIEW_EVERY)
    assert host.tiers["r"] == [2] * REVIEW_EVERY + [0]
    host.pacing.cost.segment_s = 1e-3  # and is fast again
    host.step(REVIEW_EVERY)
    assert request.tier == 2
    host.now_s = 1e4 - 1e-3  # and then there is no time left
    host.step(REVIEW_EVERY)
    assert request.tier == 0
    assert host.num_switches == {("deadline", "down"): 2, ("deadline", "up"): 1}


def test_before_anything_is_known_of_the_machine_a_deadline_moves_nothing():
    host = paced_host(num_steps=0)
    request = host.add("r", "deadline", deadline_time_s=50.0)
    host.step()
    assert request.tier == 2
    host.pacing.cost.num_steps = MIN_STEPS
    host.step()
    assert request.tier == 0


def test_without_a_cost_model_a_deadline_moves_nothing():
    host = Host(num_seats=1)
    host.add("r", "deadline", deadline_time_s=1e-3)
    host.step(20)
    assert host.tiers["r"] == [2] * 20


# -- all of them ---------------------------------------------------------------------------------


def test_a_switch_by_hand_ends_the_policy():
    core = make_core()
    submit(core, request(tier_policy="cascade", cascade_threshold=ALWAYS))
    events = core.step()
    core.switch_tier("r", "t1")
    assert of(events + drain(core))[1] == ["t0"] + ["t1"] * 19
    assert core.num_tier_switches == {("explicit", "up"): 1}


def test_requests_without_a_policy_are_never_asked(monkeypatch):
    core = make_core()

    def fail(*_):
        raise AssertionError("asked")

    for name in ("_follow_cascades", "_follow_load", "_review_deadline", "_with_policy"):
        monkeypatch.setattr(core._steering, name, fail)
    submit(core, request(tier="t1"))
    submit(core, request("named", tier_policy="explicit"))
    assert set(of(drain(core))[1]) == {"t1"}


def test_the_cores_own_policy_holds_for_requests_that_name_none():
    engine = tiny_engine(MODEL, num_feature_slots=200)
    core = EngineCore(engine, tokenizer=None, tier_policy="cascade")
    submit(core, request("r"))
    submit(core, request("named", tier="t2"))
    events = core.step()
    assert of(events)[1] == ["t0"] and of(events, "named")[1] == ["t2"]


def test_what_could_not_fit_at_the_highest_tier_is_refused_before_it_starts():
    core = make_core(num_frames=20)  # 24 tokens: 6 blocks of 2 frames at t0, of 4 at t2
    core.make_requests(request(tier="t0"))
    with pytest.raises(RequestTooLargeError, match=r"needs 24 KV frames .* 19"):
        core.make_requests(request(tier_policy="cascade"))


def test_ended_requests_are_forgotten():
    core = make_core()
    submit(core, request("a", tier_policy="load", max_tokens=3))
    submit(core, request("b", tier_policy="cascade"))
    submit(core, request("c", max_tokens=9))
    core.step()
    core.abort("b")
    drain(core)
    assert core._steering._steered == {}
