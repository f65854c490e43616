"""Counters of an engine's whole life: a failed step takes none of them back."""

from dataclasses import asdict

from mfs_trt.errors import EngineFailedError
from mfs_trt.request import FinishReason, PromptRequest, TokenEvent
from mfs_trt.sampling_params import SamplingParams
from mfs_trt.serving.core import EngineCore
from mfs_trt.serving.engine_stats import EngineCounters, EngineStats
from served import Served
from tiny import drain, submit, tiny_engine, tiny_family, tiny_model

MODEL = tiny_model(tiny_family((1, 2, 4)), deep_scale=0.1)  # so that drafts stand
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]


def stats_of(counters: EngineCounters, core: EngineCore) -> EngineStats:
    return counters.stats(
        core, num_arrived=0, num_open_requests=0, is_healthy=True, is_draining=False
    )


def counts(stats: EngineStats) -> dict[str, tuple[int, ...]]:
    """What only grows, each count as its parts."""
    found = {}
    for name, value in asdict(stats).items():
        if name.endswith(("_total", "_by_segment", "_by_tier")) and name != "num_frames_total":
            parts = value.values() if isinstance(value, dict) else value
            found[name] = (parts,) if isinstance(parts, int) else tuple(parts)
    return found


def work(core: EngineCore, counters: EngineCounters) -> None:
    """The same prompt twice, then one request that takes the seat of another."""
    for name in ("first", "again"):
        params = SamplingParams(max_tokens=6, end_id=-1)
        submit(core, PromptRequest(name, params, token_ids=PROMPT, tier="t2", draft_tiers=("t0",)))
        for event in drain(core):
            counters.count(event, event.finish_reason is not None)
    low, high = (
        PromptRequest(name, SamplingParams(max_tokens=3), token_ids=[p, *PROMPT], priority=p)
        for p, name in enumerate(("low", "high"))
    )
    submit(core, low)
    core.step()
    submit(core, high)
    drain(core)


def test_every_count_is_kept_when_the_scheduler_is_replaced_and_grows_on():
    core = EngineCore(tiny_engine(MODEL, max_num_seqs=1, num_feature_slots=64), tokenizer=None)
    counters = EngineCounters()
    work(core, counters)
    before = counts(stats_of(counters, core))
    assert before.pop("num_requests_failed_total") == (0,)
    assert all(all(parts) for parts in before.values()), before
    counters.keep(core.scheduler)
    core.reset()
    assert {**before, "num_requests_failed_total": (0,)} == counts(stats_of(counters, core))
    work(core, counters)
    after = counts(stats_of(counters, core))
    assert before["num_preemptions_total"] == (1,) and after["num_preemptions_total"] == (2,)
    assert after["num_rows_by_segment"] == tuple(2 * n for n in before["num_rows_by_segment"])
    reused = before["num_reused_tokens_by_segment"]
    assert after["num_reused_tokens_by_segment"] == tuple(2 * n for n in reused)


def test_what_a_request_is_counted_for_depends_on_its_end():
    counters = EngineCounters()
    running = TokenEvent("r", 0, token_ids=(1, 2), tier="large", num_draft_tokens=3)
    counters.count(running, is_last=False)
    assert (counters.num_output_tokens, counters.draft_tokens_by_tier) == (2, {})
    ended = TokenEvent(
        "r", 0, token_ids=(3,), tier="large", finish_reason=FinishReason.LENGTH,
        num_prompt_tokens=5, drafts_by_level=(("small", 4, 1), ("medium", 2, 2)),
    )  # fmt: skip
    counters.count(ended, is_last=True)
    counters.count(TokenEvent("s", 0, error=EngineFailedError("broken")), is_last=True)
    assert counters.output_tokens_by_tier == {"large": 3}
    assert counters.draft_tokens_by_tier == {"small": 4, "medium": 2}
    assert counters.accepted_draft_tokens_by_tier == {"small": 1, "medium": 2}
    assert (counters.num_finished, counters.num_failed) == (1, 1)
    assert counters.num_prompt_tokens == 5


def test_no_figure_of_a_served_engine_falls_when_a_step_fails(serve, monkeypatch):
    served: Served = serve(num_feature_slots=64)
    for name in ("first", "again"):
        served.submit(name, max_tokens=9, draft_tiers=("t0",)).wait()
    before = counts(served.engine.stats())
    assert all(before["draft_tokens_by_tier"] + before["num_rows_by_segment"])

    def fail(step):
        raise RuntimeError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(served.core.engine, "execute", fail)
        assert isinstance(served.submit("broken").wait().error, EngineFailedError)
    after = counts(served.engine.stats())
    assert after["num_requests_failed_total"] == (1,)
    for name, parts in before.items():
        assert all(b >= a for a, b in zip(parts, after[name], strict=True)), name
    served.submit("next").wait()
    now = counts(served.engine.stats())
    assert now["num_rows_by_segment"][0] > before["num_rows_by_segment"][0]
