"""The TensorRT engine's decode-shaped steps: recorded once a bucket, replayed, and still right."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from mfs_trt.engine import load_engine
from mfs_trt.engine.interface import EngineLimits
from random_steps import RandomSteps
from run_recorder import RunRecorder
from steps import Steps, close
from tensorrt_rig import evaluated_engine, full_config, rtx_config
from tensorrt_walks import IDS, TOLERANCE, largest_error, with_features
from tiny_folders import build_tiny_engine, folder_family, write_tiny_family

LIMITS = EngineLimits(max_num_seqs=6, max_num_batched_tokens=512, max_model_len=128)
FAMILY = folder_family((1, 3), (0,), sliding_window=40, windowed_layers=(0, 2))
REQUESTS = range(5)  # padded to six rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_family(tmp_path_factory.mktemp("family") / "f", FAMILY)


@pytest.fixture(scope="module")
def reference(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("engine") / "e"
    return load_engine(build_tiny_engine(folder, out, "reference", limits=LIMITS))


@pytest.fixture
def recorder() -> RunRecorder:
    return RunRecorder()


class Both:
    """The same steps on the reference and on the engine that records."""

    def __init__(self, reference, engine, recorder) -> None:
        self.theirs, self.ours = (Steps(with_features(e), IDS) for e in (reference, engine))
        self._recorder = recorder

    def counts_of(self, *items, tiers=None) -> tuple[int, int]:
        """Runs of plans that a step recorded and replayed."""
        expected, actual = (s.step(*items, tiers=tiers) for s in (self.theirs, self.ours))
        assert largest_error(expected, actual) < TOLERANCE
        return self._recorder.counts()


@pytest.fixture(params=[rtx_config, full_config])
def both(request, folder, reference, recorder):
    """Native layers, and plugins."""
    engine = evaluated_engine(folder, request.param(limits=LIMITS), record_run=recorder)
    return Both(reference, engine, recorder)


def test_a_bucket_is_recorded_once_then_replayed(both):
    both.counts_of(*((r, 0, 20) for r in REQUESTS))
    num_plans = 2 + 1  # segments, and the head of the tier that all leave at
    assert both.counts_of(*((r, 20, 21) for r in REQUESTS))[0] >= num_plans - 1
    for position in range(21, 31):
        assert both.counts_of(*((r, position, position + 1) for r in REQUESTS))[0] == 0


def test_each_plan_is_replayed_once_a_step(both):
    both.counts_of(*((r, 0, 20) for r in REQUESTS))
    both.counts_of(*((r, 20, 21) for r in REQUESTS))
    recorded, replayed = both.counts_of(*((r, 21, 22) for r in REQUESTS))
    assert (recorded, replayed) == (0, 2 + 2), "two segments, each with a head"
    assert both.counts_of(*((r, 22, 23) for r in REQUESTS), tiers=[0] * 5) == (0, 2)


def test_chunks_of_prompts_are_run_as_they_come(both):
    assert both.counts_of((0, 0, 33), (1, 0, 2)) == (0, 0)
    assert both.counts_of((0, 33, 34), (1, 2, 9)) == (0, 0)


def test_longer_contexts_and_more_requests_are_other_buckets(both):
    both.counts_of(*((r, 0, 31) for r in REQUESTS))
    assert both.counts_of(*((r, 31, 32) for r in REQUESTS)) == (4, 4)
    assert both.counts_of(*((r, 32, 33) for r in REQUESTS))[0] == 2, "segments read one block more"
    assert both.counts_of((0, 33, 34), (1, 33, 34), (2, 33, 34)) == (4, 4), "three requests"
    assert both.counts_of((3, 33, 34), (4, 33, 34), (0, 34, 35)) == (0, 4), "three others"


def test_padding_writes_no_byte_of_the_arena_and_is_not_read(both):
    """What the padded rows of one step leave behind is nan in the next."""
    both.counts_of(*((r, 0, 20) for r in REQUESTS))
    both.counts_of(*((r, 20, 21) for r in REQUESTS))
    engine = both.ours.engine
    num_frames = engine.kv_spec.num_frames
    frames = np.unique(np.concatenate([[0], *(t[:5].ravel() for t in both.ours.tables)]))
    others = np.setdiff1d(np.arange(num_frames), frames)
    for pair in engine.arena if isinstance(engine.arena[0], list) else [engine.arena]:
        for tensor in pair:
            assert not tensor[0].any(), "the null frame was written"
            assert not tensor[others].any(), "a frame of nobody was written"
            tensor[num_frames:] = torch.nan  # scratch
    for graphs in (*engine._decode._segments, *engine._decode._heads.values()):
        for graph in graphs._graphs.values():
            with torch.inference_mode():
                graph.recorded.output.fill_(torch.nan)
    assert both.counts_of(*((r, 21, 22) for r in REQUESTS))[0] == 0


def test_feature_pool_at_another_address_is_recorded_again(both):
    both.counts_of(*((r, 0, 20) for r in REQUESTS))
    both.counts_of(*((r, 20, 21) for r in REQUESTS))
    with_features(both.ours.engine)
    assert both.counts_of(*((r, 21, 22) for r in REQUESTS)) == (1, 4), "the segment that reads it"


def test_random_steps_with_many_decodes_equal_the_reference(both, recorder, monkeypatch):
    monkeypatch.setattr("random_steps.CHUNKS", (1, 1, 1, 1, 1, 1, 9))
    walk = RandomSteps(both.theirs, seed=0)
    for _ in range(25):
        step = walk.next()
        expected, actual = (s.engine.execute(step) for s in (both.theirs, both.ours))
        assert largest_error(expected.logits, actual.logits) < TOLERANCE
    for theirs, ours in zip(both.theirs.engine.features, both.ours.engine.features, strict=True):
        close(ours.numpy(), theirs.numpy(), TOLERANCE)
    recorded, replayed = recorder.counts()
    assert 0 < recorded < replayed


def test_without_a_recorder_every_step_runs_as_it_comes(folder, reference, recorder):
    engine = evaluated_engine(folder, rtx_config(limits=LIMITS))
    both = Both(reference, engine, recorder)
    both.counts_of(*((r, 0, 20) for r in REQUESTS))
    assert both.counts_of(*((r, 20, 21) for r in REQUESTS)) == (0, 0)
    assert engine._decode is None


def test_rows_whose_keys_exist_already_are_replayed_too(both):
    whole = both.ours.step((0, 0, 20))
    rows = [both.ours.rows(s, [(0, 19, 20)]) for s in range(2)]
    exists = [replace(r, slot_mapping=np.full_like(r.slot_mapping, -1)) for r in rows]
    again = both.ours.execute([(0, 19, 20)], exists).logits
    assert largest_error([logits[19:] for logits in whole], again) < TOLERANCE
