"""Requests, KV managers and schedulers for tests of host logic: no engine, no tensors."""

from collections.abc import Sequence
from types import SimpleNamespace

from mfs_trt.engine.interface import EngineLimits, KVCacheSpec
from mfs_trt.kv_cache.manager import KVCacheManager
from mfs_trt.request import PromptRequest, Request
from mfs_trt.sampling_params import SamplingParams
from mfs_trt.scheduler.output import SchedulerOutput
from mfs_trt.scheduler.scheduler import Scheduler


def make_request(
    name: str = "r",
    num_prompt_tokens: int = 4,
    *,
    tier: int = 0,
    arrival: float = 0.0,
    priority: int = 0,
    max_tokens: int = 8,
    min_tokens: int = 0,
    end_token_ids: Sequence[int] = (),
    prompt: Sequence[int] | None = None,
    reuse_prefix: bool = False,
    cache_salt: str = "",
    **fields,
) -> Request:
    """A request whose prompt is 100, 101, …; tokens above 1000 are what `run_step` samples."""
    params = SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens)
    prompt = list(prompt or range(100, 100 + num_prompt_tokens))
    return Request(
        request_id=name,
        prompt_request=PromptRequest(
            name,
            params,
            token_ids=prompt,
            priority=priority,
            reuse_prefix=reuse_prefix,
            cache_salt=cache_salt,
        ),
        sequence_index=0,
        prompt_token_ids=prompt,
        tier=tier,
        params=params,
        seed=0,
        end_token_ids=frozenset(end_token_ids),
        arrival_time_s=arrival,
        **fields,
    )


def make_manager(
    num_frames: int = 1000,
    *,
    groups: Sequence[int] = (1, 1, 2),
    block_size: int = 4,
    max_num_seqs: int = 8,
    max_model_len: int = 64,
    num_feature_slots: int = 0,
) -> KVCacheManager:
    spec = KVCacheSpec(
        group_size=1,
        groups_per_segment=tuple(groups),
        num_kv_heads=1,
        head_dim=2,
        block_size=block_size,
        layer_nbytes=2 * 2 * 4 * block_size,
        num_frames=num_frames,
        num_feature_slots=num_feature_slots,
    )
    return KVCacheManager(spec, max_num_seqs, max_model_len)


def make_scheduler(
    num_frames: int = 1000,
    *,
    budget: int = 64,
    max_num_seqs: int = 8,
    max_model_len: int = 64,
    **manager_settings,
) -> Scheduler:
    limits = EngineLimits(max_num_seqs, budget, max_model_len)
    manager = make_manager(
        num_frames, max_num_seqs=max_num_seqs, max_model_len=max_model_len, **manager_settings
    )
    return Scheduler(limits, manager)


def add(scheduler: Scheduler, *requests: Request) -> None:
    for request in requests:
        scheduler.check_fits(request)
        scheduler.add(request)


def run_step(scheduler: Scheduler, token_id: int = 1000) -> SchedulerOutput:
    """One step in which every exit samples `token_id`."""
    output = scheduler.schedule()
    names = [name for names in output.sampled for name in names]
    scheduler.update(output, {name: decided(token_id) for name in names})
    return output


def decided(*token_ids: int) -> SimpleNamespace:
    """What `Scheduler.update` takes for one request."""
    return SimpleNamespace(token_ids=token_ids, probs=(None,) * len(token_ids))


def computed_tokens(output: SchedulerOutput) -> dict[str, tuple[int, ...]]:
    """Request id → computed tokens per segment when the step is over."""
    return dict(output.computed)
