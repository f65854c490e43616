"""Requests that arrive and may be cancelled at any step of one core."""

from collections.abc import Sequence

from mfs_trt.engine.interface import Engine
from mfs_trt.request import FinishReason, PromptRequest
from mfs_trt.sampling_params import SamplingParams
from mfs_trt.serving.core import EngineCore
from tiny import submit

# name, prompt, params, tier, step of arrival, steps until it is cancelled, priority
Arrival = tuple[str, list[int], SamplingParams, str, int, int | None, int]


def run_together(engine: Engine, arrivals: Sequence[Arrival]) -> dict[str, list[int]]:
    """Tokens per request that is not cancelled; checks the arena after every step."""
    core = EngineCore(engine, tokenizer=None)
    tokens: dict[str, list[int]] = {}
    reasons: dict[str, FinishReason] = {}
    step = 0
    last_arrival = max(a[4] for a in arrivals)
    while core.has_requests or step <= last_arrival:
        for name, prompt, params, tier, arrival, cancel, priority in arrivals:
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
    assert core.scheduler.kv_cache.num_used_frames == 0
    return tokens
