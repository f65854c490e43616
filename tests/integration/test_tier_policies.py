"""Tier policies through a real server: answers that climb, give way to load and meet deadlines."""

import math

import pytest

from mfs_trt.client import Client
from mfs_trt.errors import FamilyError, InvalidRequestError
from mfs_trt.sampling_params import SamplingParams
from mfs_trt.scheduler.policies import CALM_STEPS, MIN_DWELL, MIN_TOKENS, PRESSED_STEPS
from probes import metric, num_active, settle, wait_until
from streams import Stream

pytestmark = pytest.mark.triton

PROMPT = "the river moves"
TIERS = ["small", "medium", "large"]
OUTPUTS = ("text_output", "tier_used")


@pytest.fixture
def client(server):
    with Client(f"127.0.0.1:{server.grpc_port}") as made:
        yield made


def fields(max_tokens: int, **more) -> dict:
    asked = {"text_input": PROMPT, "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
    return {**asked, **more}


def tiers_of(stream: Stream) -> list[str]:
    """The tier of each response so far."""
    return [tier.decode() for tier in stream.values("tier_used")]


def changes(tiers: list[str]) -> list[str]:
    return [b for a, b in zip([None, *tiers], tiers, strict=False) if a != b]


def num_switches(server, direction: str) -> float:
    """Of the policy `load`, so far; by figures of now."""
    settle(server)
    value = metric(server, "mfs_tier_switches_total", policy="load", direction=direction)
    return 0.0 if math.isnan(value) else value


# -- cascade -------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["ensemble", "family", "tensorrt_llm_bls"])
def test_a_cascade_whose_threshold_always_fires_ends_at_the_highest_tier(server, model):
    asked = fields(3 * MIN_TOKENS, tier_policy="cascade", cascade_threshold=0.0)
    stream = Stream(server.grpc_port, asked, model=model, outputs=OUTPUTS).finish()
    assert stream.error is None
    assert changes(tiers_of(stream)) == TIERS


def test_a_cascade_ends_within_its_bounds_and_where_it_is_sure_at_the_lowest(client):
    params = SamplingParams(max_tokens=3 * MIN_TOKENS, ignore_eos=True)

    def tier_used(**more) -> str:
        (completion,) = client.generate(PROMPT, params, tier_policy="cascade", **more)
        return completion.tier

    assert tier_used(cascade_threshold=0.0) == "large"
    assert tier_used(cascade_threshold=0.0, max_tier="medium") == "medium"
    assert tier_used(cascade_threshold=-1e3) == "small"
    assert tier_used(cascade_threshold=-1e3, min_tier="medium") == "medium"


def test_the_token_model_takes_a_cascade_too_and_its_text_is_that_of_the_offline_engine(
    server, llm
):
    ids = llm.tokenizer.encode(PROMPT)
    policy = {"tier_policy": "cascade", "cascade_threshold": 0.0}
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    (expected,) = llm.generate([ids], params, **policy)
    stream = Stream(
        server.grpc_port,
        {
            "input_ids": ids,
            "input_lengths": len(ids),
            "request_output_len": 20,
            "ignore_eos": True,
            "streaming": True,
            **policy,
        },
        model="tensorrt_llm",
        outputs=("output_ids", "tier_used"),
    ).finish()
    assert stream.values("output_ids") == expected.outputs[0].token_ids
    assert changes(tiers_of(stream)) == TIERS and expected.tier == "large"


# -- load ----------------------------------------------------------------------------------------


def test_load_lowers_the_tier_under_a_held_queue_and_raises_it_again(slow_server):
    """One request watches; others fill the seats and the queue until they are stopped."""
    port, directions = slow_server.grpc_port, ("down", "up")
    before = [num_switches(slow_server, d) for d in directions]
    slow_server.set("hold")
    asked = fields(CALM_STEPS + 4 * MIN_DWELL + 40, tier_policy="load")
    watcher = Stream(port, asked, outputs=OUTPUTS, model="family")
    slow_server.step()
    names = [f"other-{i}" for i in range(2 * slow_server.max_num_seqs)]
    others = [
        Stream(port, fields(300, tier="small"), request_id=name, model="family") for name in names
    ]
    wait_until(lambda: num_active(slow_server) == 1 + len(others))
    slow_server.step(PRESSED_STEPS + MIN_DWELL + 5)
    stop = {"text_input": "", "max_tokens": 1, "stop": True}
    for name in names:
        Stream(port, stop, request_id=name, model="family").finish()
    slow_server.clear("hold")
    assert watcher.finish().error is None
    assert changes(tiers_of(watcher)) == ["large", "medium", "small", "medium", "large"]
    assert all("CANCELLED" in s.finish().error for s in others)
    after = [num_switches(slow_server, d) for d in directions]
    assert [b - a for a, b in zip(before, after, strict=True)] == [2, 2]


# -- deadline ------------------------------------------------------------------------------------


def test_a_tight_deadline_runs_at_a_low_tier_and_a_loose_one_at_the_highest(slow_server):
    """A step takes 40 ms at least, so that 400 tokens take 16 seconds."""
    port = slow_server.grpc_port
    slow_server.set("step_delay_s", "0.04")
    Stream(port, fields(100)).finish()  # what a step costs becomes known

    def first_tier(deadline_ms: int) -> str:
        asked = fields(400, tier_policy="deadline", deadline_ms=deadline_ms)
        stream = Stream(port, asked, outputs=OUTPUTS, model="family").wait_first()
        assert stream.error is None
        stream.disconnect()
        return tiers_of(stream)[0]

    assert first_tier(4_000) == "small"
    assert first_tier(10**8) == "large"


# -- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "error", "message"),
    [
        ({"tier_policy": "luck"}, InvalidRequestError, "tier_policy: expected one of .*'luck'"),
        ({"tier_policy": "deadline"}, InvalidRequestError, "deadline: expected one .*, got none"),
        (
            {"tier_policy": "load", "min_tier": "large", "max_tier": "small"},
            InvalidRequestError,
            "min_tier: expected at most max_tier 'small', got 'large'",
        ),
        ({"tier_policy": "load", "min_tier": "huge"}, FamilyError, "got 'huge'"),
        ({"cascade_threshold": -1.0}, InvalidRequestError, "cascade_threshold: .*got 'explicit'"),
    ],
)
def test_what_cannot_be_steered_is_refused_in_one_line(client, asked, error, message):
    with pytest.raises(error, match=message) as caught:
        client.generate(PROMPT, **asked)
    assert "\n" not in str(caught.value)
