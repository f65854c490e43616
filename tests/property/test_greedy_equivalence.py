"""The law: whatever shares the engine, each request gets exactly the tokens that it gets alone."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mfs_trt.sampling_params import SamplingParams
from run_together import run_together
from tiny import run_alone, tiny_engine, tiny_family, tiny_model

EXITS = [(1, 2, 3), (1, 2, 4), (2, 3), (1, 4)]
MODELS = {exits: tiny_model(tiny_family(exits)) for exits in EXITS}


@st.composite
def workloads(draw):
    """A family, an engine's sizes and requests that arrive, and may be cancelled, at any step."""
    exits = draw(st.sampled_from(EXITS))
    block_size = draw(st.sampled_from([1, 2, 3, 4, 8]))
    chunk = draw(
        st.sampled_from(sorted({1, max(1, block_size - 1), block_size, block_size + 1, 7, 64}))
    )
    requests = []
    for i in range(draw(st.integers(1, 6))):
        prompt = draw(st.lists(st.integers(0, 60), min_size=1, max_size=20))
        greedy = draw(st.booleans())
        params = SamplingParams(
            max_tokens=draw(st.integers(1, 12)),
            temperature=None if greedy else 1.2,
            seed=None if greedy else draw(st.integers(0, 9)),
            repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.3])),
            end_id=draw(st.sampled_from([-1, 5, 17])),
        )
        tier = f"t{draw(st.integers(0, len(exits) - 1))}"
        arrival = draw(st.integers(0, 8))
        cancel = draw(st.sampled_from([None, None, None, 0, 1, 3, 6]))
        priority = draw(st.integers(0, 2))
        requests.append((f"r{i}", prompt, params, tier, arrival, cancel, priority))
    groups = tiny_family(exits).groups_per_segment
    longest = max(len(r[1]) + r[2].max_tokens - 1 for r in requests)
    smallest_arena = -(-longest // block_size) * sum(groups)
    slack = draw(st.sampled_from([0, 1, 5, 20, 200]))  # little slack forces preemption
    return {
        "exits": exits,
        "requests": requests,
        "block_size": block_size,
        "num_frames": 1 + smallest_arena + slack,
        "max_num_batched_tokens": chunk,
        "max_num_seqs": draw(st.integers(1, 6)),
    }


def check_law(workload) -> None:
    model = MODELS[workload["exits"]]
    sizes = ("block_size", "num_frames", "max_num_batched_tokens", "max_num_seqs")
    engine = tiny_engine(model, **{name: workload[name] for name in sizes})
    tokens = run_together(engine, workload["requests"])
    alone = {
        name: run_alone(model, prompt, tier, params)
        for name, prompt, params, tier, *_ in workload["requests"]
        if name in tokens
    }
    assert tokens == alone


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(workloads())
def test_every_request_gets_the_tokens_it_gets_alone(workload):
    check_law(workload)


@pytest.mark.slow
@settings(max_examples=3000, deadline=None, suppress_health_check=list(HealthCheck))
@given(workloads())
def test_every_request_gets_the_tokens_it_gets_alone_at_length(workload):
    check_law(workload)
