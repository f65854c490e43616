"""The law: whatever shares the engine, each request gets exactly the tokens that it gets alone.

Alone means here: from the model run over the whole text for every token, with neither scheduler nor
cache.
"""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from alone import tokens_alone
from mfs_trt.request import PromptRequest
from mfs_trt.sampling_params import SamplingParams
from run_together import Arrival, run_together
from tiny import tiny_engine, tiny_family, tiny_model

EXITS = [(1, 2, 3), (1, 2, 4), (2, 3), (1, 4)]
MODELS = {exits: tiny_model(tiny_family(exits)) for exits in EXITS}
PREFIX = [7, 23, 4, 41, 4, 19, 30, 2, 55, 12, 12, 8, 33, 9]


@st.composite
def arrivals(draw, exits, num_requests):
    requests = []
    for i in range(num_requests):
        own = draw(st.lists(st.integers(0, 60), min_size=1, max_size=12))
        shared = PREFIX[: draw(st.sampled_from([0, 0, 5, 8, 13, 14]))]
        greedy = draw(st.booleans())
        params = SamplingParams(
            max_tokens=draw(st.integers(1, 12)),
            temperature=None if greedy else 1.2,
            seed=None if greedy else draw(st.integers(0, 9)),
            repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.3])),
            end_id=draw(st.sampled_from([-1, 5, 17])),
        )
        tiers = [f"t{k}" for k in range(len(exits))]
        switches = draw(st.lists(st.tuples(st.integers(0, 9), st.sampled_from(tiers)), max_size=3))
        tier = draw(st.integers(0, len(exits) - 1))
        # Speculation keeps the law of sampled tokens, not the tokens: see test_speculative.
        chain = draw(st.sets(st.integers(0, tier - 1))) if tier and greedy else set()
        request = PromptRequest(
            f"r{i}",
            params,
            token_ids=[*shared, *own],
            tier=tiers[tier],
            draft_tiers=tuple(tiers[k] for k in sorted(chain)),
            num_speculative_tokens=draw(st.sampled_from([None, 0, 1, 3])),
            priority=draw(st.integers(0, 2)),
            reuse_prefix=draw(st.sampled_from([True, True, True, False])),
            cache_salt=draw(st.sampled_from(["", "", "a"])),
        )
        cancelled = draw(st.sampled_from([None, None, None, 0, 1, 3, 6]))
        requests.append(Arrival(request, draw(st.integers(0, 8)), cancelled, tuple(switches)))
    return requests


@st.composite
def workloads(draw):
    """A family, an engine's sizes, and requests that may do anything at any step."""
    exits = draw(st.sampled_from(EXITS))
    block_size = draw(st.sampled_from([1, 2, 3, 4, 8]))
    chunk = draw(
        st.sampled_from(sorted({1, max(1, block_size - 1), block_size, block_size + 1, 7, 64}))
    )
    requests = draw(arrivals(exits, draw(st.integers(1, 6))))
    groups = tiny_family(exits).groups_per_segment
    longest = max(len(r.request.token_ids) + r.request.params.max_tokens - 1 for r in requests)
    smallest_arena = -(-longest // block_size) * sum(groups)
    slack = draw(st.sampled_from([0, 1, 5, 20, 200]))  # little slack forces preemption
    return {
        "exits": exits,
        "requests": requests,
        "block_size": block_size,
        "num_frames": 1 + smallest_arena + slack,
        "num_feature_slots": block_size * draw(st.sampled_from([0, 2, 5, 40])),
        "max_num_batched_tokens": chunk,
        "max_num_seqs": draw(st.integers(1, 6)),
    }


SIZES = (
    "block_size",
    "num_frames",
    "num_feature_slots",
    "max_num_batched_tokens",
    "max_num_seqs",
)


def check_law(workload) -> None:
    model = MODELS[workload["exits"]]
    engine = tiny_engine(model, **{name: workload[name] for name in SIZES})
    served = run_together(engine, workload["requests"])
    for arrival in workload["requests"]:
        request = arrival.request
        if request.request_id not in served:
            continue
        got = served[request.request_id]
        alone = tokens_alone(model, request.token_ids, request.params, got.tiers)
        assert got.token_ids == alone
        ended = got.token_ids[-1] == request.params.end_id
        assert ended or len(got.token_ids) == request.params.max_tokens


@settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))
@given(workloads())
def test_every_request_gets_the_tokens_it_gets_alone(workload):
    check_law(workload)


@pytest.mark.slow
@settings(max_examples=10_000, deadline=None, suppress_health_check=list(HealthCheck))
@given(workloads())
def test_every_request_gets_the_tokens_it_gets_alone_at_length(workload):
    check_law(workload)
