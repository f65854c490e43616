"""Requests that arrive, change tier and may be cancelled at any step of one core."""

from collections.abc import Sequence
from dataclasses import dataclass

from mfs_trt.engine.interface import Engine
from mfs_trt.request import FinishReason, PromptRequest
from mfs_trt.serving.core import EngineCore
from tiny import submit


@dataclass(frozen=True)
class Arrival:
    request: PromptRequest
    step: int = 0
    cancelled_after: int | None = None  # steps
    switches: tuple[tuple[int, str], ...] = ()  # steps after arrival, tier


@dataclass
class Served:
    """What one request got: its tokens and the tier of each."""

    token_ids: list[int]
    tiers: list[str]


def run_together(engine: Engine, arrivals: Sequence[Arrival]) -> dict[str, Served]:
    """Per request that is not cancelled; checks the arena after every step."""
    return run_on(EngineCore(engine, tokenizer=None), arrivals)


def run_on(core: EngineCore, arrivals: Sequence[Arrival]) -> dict[str, Served]:
    served: dict[str, Served] = {}
    reasons: dict[str, FinishReason] = {}
    step = 0
    last_arrival = max(a.step for a in arrivals)
    while core.has_requests or step <= last_arrival:
        for arrival in arrivals:
            name = arrival.request.request_id
            if arrival.step == step:
                served[name] = Served([], [])
                submit(core, arrival.request)
            for after, tier in arrival.switches:
                if arrival.step + after == step:
                    core.switch_tier(name, tier)
            cancelled = arrival.cancelled_after
            if cancelled is not None and arrival.step + cancelled == step and name not in reasons:
                core.abort(name)
                served.pop(name)
        if core.has_requests:
            for event in core.step():
                served[event.request_id].token_ids += event.token_ids
                served[event.request_id].tiers += [event.tier] * len(event.token_ids)
                if event.finish_reason is not None:
                    reasons[event.request_id] = event.finish_reason
        core.scheduler.kv_cache.check_integrity()
        step += 1
        assert step < 5000, "the workload does not end"
    assert core.scheduler.kv_cache.num_used_frames == 0
    return served
