"""The law: whatever shares the engine, each request gets exactly the tokens that it gets alone."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mfs_trt.request import FinishReason, PromptRequest
from mfs_trt.sampling_params import SamplingParams
from mfs_trt.serving.core import EngineCore
from tiny import run_alone, submit, tiny_engine, tiny_family, tiny_model

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


def run_together(workload) -> tuple[dict[str, list[int]], EngineCore]:
    """Tokens per surviving request; checks the arena after every step."""
    engine = tiny_engine(
        MODELS[workload["exits"]],
        block_size=workload["block_size"],
        num_frames=workload["num_frames"],
        max_num_batched_tokens=workload["max_num_batched_tokens"],
        max_num_seqs=workload["max_num_seqs"],
    )
    core = EngineCore(engine, tokenizer=None)
    tokens: dict[str, list[int]] = {}
    reasons: dict[str, FinishReason] = {}
    step = 0
    last_arrival = max(r[4] for r in workload["requests"])
    while core.has_requests or step <= last_arrival:
        for name, prompt, params, tier, arrival, cancel, priority in workload["requests"]:
            if arrival == step:
                tokens[name] = []
                submit(
                    core,
                    PromptRequest(name, params, token_ids=prompt, tier=tier, priority=priority),
                )
            if cancel is not None and arrival + cancel == step and name not in reasons:
                core.abort(name)
                tokens.pop(name)
        if core.has_requests:
            for event in core.step():
                tokens[event.request_id] += event.token_ids
                if event.finish_reason is not None:
                    reasons[event.request_id] = event.finish_reason
        core.scheduler.kv_cache.check_integrity()
        step += 1
        assert step < 5000, "the workload does not end"
    return tokens, core


def check_law(workload) -> None:
    tokens, core = run_together(workload)
    alone = {
        name: run_alone(MODELS[workload["exits"]], prompt, tier, params)
        for name, prompt, params, tier, *_ in workload["requests"]
        if name in tokens
    }
    assert tokens == alone
    assert core.scheduler.kv_cache.num_used_frames == 0


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(workloads())
def test_every_request_gets_the_tokens_it_gets_alone(workload):
    check_law(workload)


@pytest.mark.slow
@settings(max_examples=3000, deadline=None, suppress_health_check=list(HealthCheck))
@given(workloads())
def test_every_request_gets_the_tokens_it_gets_alone_at_length(workload):
    check_law(workload)
