"""The law: whatever shares the engine, each request gets exactly the tokens that it gets alone.

Alone means here: from the model run over the whole text for every token, with neither scheduler nor
cache.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from alone import tokens_alone
from mfs_trt.request import PromptRequest
from mfs_trt.sampling_params import SamplingParams
from mfs_trt.serving.core import EngineCore
from run_together import Arrival, run_on
from tiny import tiny_engine, tiny_family, tiny_model
from whims import Whims

EXITS = [(1, 2, 3), (1, 2, 4), (2, 3), (1, 4)]
# Tiers that mostly disagree, and tiers that mostly agree: drafts fall, drafts stand.
MODELS = {
    (exits, agrees): tiny_model(tiny_family(exits), deep_scale=0.1 if agrees else 1.0)
    for exits in EXITS
    for agrees in (False, True)
}
PREFIX = [7, 23, 4, 41, 4, 19, 30, 2, 55, 12, 12, 8, 33, 9]


Choose = Callable[[Sequence[Any]], Any]  # one of several, by whoever generates


def make_arrival(choose: Choose, name: str, num_tiers: int) -> Arrival:
    """A request that may share a prefix, draft, change tier and be cancelled, at any step."""
    own = [choose(range(61)) for _ in range(choose(range(1, 13)))]
    shared = PREFIX[: choose([0, 0, 5, 8, 13, 14])]
    greedy = choose([True, True, False])
    params = SamplingParams(
        max_tokens=choose(range(1, 13)),
        temperature=None if greedy else 1.2,
        seed=None if greedy else choose(range(10)),
        repetition_penalty=choose([1.0, 1.0, 1.3]),
        end_id=choose([-1, 5, 17]),
    )
    tiers = [f"t{k}" for k in range(num_tiers)]
    tier = choose([*range(num_tiers), num_tiers - 1])
    # Speculation keeps the law of sampled tokens, not the tokens: see test_speculation_law.
    chain = [t for t in tiers[:tier] if greedy and choose([True, False])]
    switches = [(choose(range(10)), choose(tiers)) for _ in range(choose([0, 0, 1, 2]))]
    request = PromptRequest(
        name,
        params,
        token_ids=[*shared, *own],
        tier=tiers[tier],
        draft_tiers=tuple(chain),
        num_speculative_tokens=choose([None, None, 0, 1, 3]),
        priority=choose(range(3)),
        reuse_prefix=choose([True, True, True, False]),
        cache_salt=choose(["", "", "a"]),
    )
    return Arrival(request, choose(range(9)), choose([None] * 6 + [0, 1, 3, 6]), tuple(switches))


def make_workload(choose: Choose) -> dict[str, Any]:
    """A family, an engine's sizes, and requests."""
    exits = choose(EXITS)
    block_size = choose([1, 2, 3, 4, 8])
    chunk = choose(sorted({1, max(1, block_size - 1), block_size, block_size + 1, 7, 64}))
    arrivals = [make_arrival(choose, f"r{i}", len(exits)) for i in range(choose(range(1, 7)))]
    groups = tiny_family(exits).groups_per_segment
    longest = max(len(a.request.token_ids) + a.request.params.max_tokens - 1 for a in arrivals)
    smallest_arena = -(-longest // block_size) * sum(groups)
    return {
        "model": (exits, choose([False, True])),
        "arrivals": arrivals,
        "block_size": block_size,
        "num_frames": 1 + smallest_arena + choose([0, 1, 5, 20, 200]),  # little forces preemption
        "num_feature_slots": block_size * choose([0, 2, 5, 40]),
        "max_num_batched_tokens": chunk,
        "max_num_seqs": choose(range(1, 7)),
        "whims": choose([None, None, *range(6)]),  # how prompts are paced and drafts are made
    }


@st.composite
def workloads(draw):
    """For small counterexamples."""
    return make_workload(lambda options: draw(st.sampled_from(options)))


SIZES = (
    "block_size",
    "num_frames",
    "num_feature_slots",
    "max_num_batched_tokens",
    "max_num_seqs",
)


def check_law(workload) -> None:
    model = MODELS[workload["model"]]
    engine = tiny_engine(model, **{name: workload[name] for name in SIZES})
    core = EngineCore(engine, tokenizer=None)
    if workload["whims"] is not None:
        core.scheduler.pacing = core.scheduler.drafting = Whims(workload["whims"])
    served = run_on(core, workload["arrivals"])
    for arrival in workload["arrivals"]:
        request = arrival.request
        if request.request_id not in served:
            continue
        got = served[request.request_id]
        alone = tokens_alone(model, request.token_ids, request.params, got.tiers)
        assert got.token_ids == alone
        ended = got.token_ids[-1] == request.params.end_id
        assert ended or len(got.token_ids) == request.params.max_tokens


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(workloads())
def test_every_request_gets_the_tokens_it_gets_alone(workload):
    check_law(workload)


def check_seeds(seeds: range) -> None:
    """Even draws: denser in rare combinations than hypothesis' own."""
    for seed in seeds:
        rng = random.Random(seed)
        try:
            check_law(make_workload(rng.choice))
        except Exception as error:
            raise AssertionError(f"workload of seed {seed}") from error


def test_every_request_gets_the_tokens_it_gets_alone_in_many_mixes():
    check_seeds(range(350))


@pytest.mark.slow
def test_every_request_gets_the_tokens_it_gets_alone_at_length():
    check_seeds(range(1000, 11_000))
