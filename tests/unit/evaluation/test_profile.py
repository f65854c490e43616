import numpy as np
import pytest

from mfs_trt.evaluation import latency
from mfs_trt.evaluation.latency import DepthLatency, LatencyLine, Workload, measure_latencies
from mfs_trt.evaluation.profile import (
    MAX_CANDIDATES,
    candidate_depths,
    profile_latencies,
    profile_losses,
    wanted_depths,
)
from mfs_trt.precipitation.documents import Document
from mfs_trt.precipitation.packing import PackedTokens
from mfs_trt.serving.core import EngineCore
from mfs_trt.weights.store import WeightStore
from tiny import tiny_engine, tiny_family, tiny_model
from tiny_folders import folder_family, write_tiny_family

WORKLOAD = Workload(prompt_tokens=12, output_tokens=4, rounds=3)


@pytest.mark.parametrize(
    ("exits", "expected"),
    [
        ((4,), (1, 2, 3, 4)),
        ((10, 20, 30), (3, 6, 9, 10, 12, 15, 18, 20, 21, 24, 27, 30)),
        ((13,), (2, 4, 6, 8, 10, 12, 13)),
        ((40,), (4, 8, 12, 16, 20, 24, 28, 32, 36, 40)),
    ],
)
def test_candidate_depths_are_even_and_include_the_exits(exits, expected):
    assert candidate_depths(tiny_family(exits)) == expected


def test_there_are_never_many_candidates():
    for depth in range(1, 130):
        found = candidate_depths(tiny_family((depth,)))
        assert len(found) <= MAX_CANDIDATES
        assert found[-1] == depth


class SteppingClock:
    """Replaces the engine's work by a time of `base + per_layer · layers` milliseconds a token."""

    def __init__(self, core: EngineCore):
        self.core, self._step = core, core.step
        core.step = self.step

    def step(self):
        running = next(iter(self.core.scheduler.requests.values()))
        layers = self.core.family.tiers[running.tier].exit_layer
        tokens = 12 if running.num_output_tokens == 0 else 1
        events = self._step()
        self.core.last_step_duration_s = tokens * (2 + 3 * layers) / 1000
        return events


def test_latency_of_each_tier_is_its_own_prefill_and_decode():
    core = EngineCore(tiny_engine(tiny_model(tiny_family())), tokenizer=None)
    SteppingClock(core)
    found = measure_latencies(core, WORKLOAD)
    assert [row.num_layers for row in found] == [1, 2, 4]
    for row in found:
        assert row.decode_ms == pytest.approx(2 + 3 * row.num_layers)
        assert row.prefill_ms == pytest.approx(12 * row.decode_ms)
        assert row.request_ms(4) == pytest.approx(row.prefill_ms + 3 * row.decode_ms)


def test_prefill_in_several_steps_counts_all_of_them():
    engine = tiny_engine(tiny_model(tiny_family()), max_num_batched_tokens=5)
    core = EngineCore(engine, tokenizer=None)
    SteppingClock(core)  # each of the three steps takes the time of twelve tokens
    found = measure_latencies(core, WORKLOAD)
    assert found[0].prefill_ms == pytest.approx(3 * 12 * 5)


def test_tiers_take_turns_and_the_first_round_is_not_counted(monkeypatch):
    calls = []

    def run(core, tier, workload, number):
        calls.append((number, tier))
        return (1000.0, 1000.0) if number == 0 else (number * 1.0, number * 2.0)

    monkeypatch.setattr(latency, "_run", run)
    core = EngineCore(tiny_engine(tiny_model(tiny_family())), tokenizer=None)
    found = measure_latencies(core, WORKLOAD)
    assert calls == [(n, t) for n in range(4) for t in ("t0", "t1", "t2")]
    assert found[0] == DepthLatency(1, 2.0, 4.0)


def test_line_through_latencies_gives_the_depth_that_takes_so_long():
    line = LatencyLine.fit([3, 6, 9], [11.0, 20.0, 29.0])
    assert line.at(5) == pytest.approx(17.0)
    assert line.depth(17.0) == pytest.approx(5.0)
    assert LatencyLine.fit([4], [8.0]).depth(4.0) == pytest.approx(2.0)
    assert LatencyLine(5.0, 0.0).depth(4.0) == np.inf


ROWS = tuple(DepthLatency(n, 10.0 + 10 * n, 1.0 + n) for n in (2, 4, 8))


def test_depth_as_fast_as_a_model_is_by_its_whole_request():
    other = DepthLatency(99, prefill_ms=40.0, decode_ms=10.0)  # 70 ms in all
    ((reason, depth),) = wanted_depths(ROWS, WORKLOAD, like=[("m", other)])
    assert reason == "as fast as m"
    assert depth == pytest.approx((70.0 - 13.0) / 13.0)  # 10 + 10 n + 3 (1 + n)


def test_depth_for_a_speed_is_by_decoding_alone():
    ((_, depth),) = wanted_depths(ROWS, WORKLOAD, tokens_per_s=[1000 / 6.0])
    assert depth == pytest.approx(5.0)


def test_depth_is_the_whole_for_any_lower_speed_and_none_for_an_impossible_one():
    found = wanted_depths(ROWS, WORKLOAD, tokens_per_s=[1.0, 1e6, 1000 / 2.1])
    assert [depth for _, depth in found] == [8.0, 0.0, pytest.approx(1.1)]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("profile") / "family"
    return WeightStore(write_tiny_family(folder, folder_family((2, 4), (0,))))


@pytest.mark.parametrize("target", ["openvino", "reference"])
def test_every_depth_of_a_family_folder_is_measured(store, target):
    found = profile_latencies(store, (1, 2, 3, 4), Workload(8, 2, 1), target)
    assert [row.num_layers for row in found] == [1, 2, 3, 4]
    assert all(row.prefill_ms > 0 and row.decode_ms > 0 for row in found)


def test_losses_of_new_depths_are_those_of_the_top_tiers_exit(store):
    ids = np.random.default_rng(0).integers(1, 61, 100).astype(np.int32)
    document = Document(ids, np.ones(100, bool))
    tokens = PackedTokens.from_documents([document], 20, 0, end_token_id=0)
    found = profile_losses(store, (1, 2, 3, 4), tokens, None)
    assert [row.exit_layer for row in found.losses] == [1, 2, 3, 4]
    assert [(pair.draft, pair.target) for pair in found.pairs] == [
        ("layer1", "t1"),
        ("t0", "t1"),
        ("layer3", "t1"),
    ]
    assert len({row.loss for row in found.losses}) == 4
