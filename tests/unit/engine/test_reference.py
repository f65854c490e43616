"""The reference engine: how a step is cut, mixed and resumed never changes its numbers."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from mfs_trt.engine.interface import StepInput
from mfs_trt.engine.reference import ReferenceEngine
from mfs_trt.model.transformer import NestedModel
from steps import Steps, close
from tiny import tiny_engine, tiny_family, tiny_model

BLOCK_SIZE = 4
MAX_BLOCKS = 4
IDS = np.random.default_rng(0).integers(0, 61, (2, MAX_BLOCKS * BLOCK_SIZE)).astype(np.int32)


def new_steps(model: NestedModel, **engine_settings) -> Steps:
    """Two requests on a reference engine of their own."""
    return Steps(tiny_engine(model, block_size=BLOCK_SIZE, **engine_settings), IDS)


@pytest.fixture(scope="module")
def model():
    return tiny_model(tiny_family((1, 2, 4)))


@pytest.fixture(scope="module")
def whole(model):
    """Logits of both requests' 13 tokens at every tier, each computed alone in one piece."""
    return [new_steps(model).step((r, 0, 13)) for r in range(2)]


@pytest.mark.parametrize("borders", [[1], [4], [5], [3, 4, 9], list(range(1, 13))])
def test_prompt_in_chunks_equals_prompt_in_one_piece(model, whole, borders):
    steps = new_steps(model)
    parts = [steps.step((0, a, b)) for a, b in zip([0, *borders], [*borders, 13], strict=True)]
    for s in range(3):
        close(np.concatenate([part[s] for part in parts]), whole[0][s])


def test_requests_of_different_tiers_in_one_step_equal_separate_steps(model, whole):
    steps = new_steps(model)
    steps.step((1, 0, 6))
    # Request 1 decodes at the top tier beside a prompt at tier 0.
    logits = steps.step((1, 6, 7), (0, 0, 13), tiers=[2, 0])
    close(logits[0], np.concatenate([whole[1][0][6:7], whole[0][0]]))
    close(logits[1], whole[1][1][6:7])
    close(logits[2], whole[1][2][6:7])


def test_segment_without_rows_has_no_logits(model):
    logits = new_steps(model).step((0, 0, 3), tiers=[0])
    assert logits[1] is None and logits[2] is None


def test_only_wanted_rows_have_logits(model, whole):
    steps = new_steps(model)
    segments = [steps.rows(s, [(0, 0, 13)]) for s in range(3)]
    none, one = np.array([], np.int32), np.array([12], np.int32)
    segments = [replace(r, exit_rows=x) for r, x in zip(segments, (none, none, one), strict=True)]
    logits = steps.execute([(0, 0, 13)], segments).logits
    assert logits[0] is None and logits[1] is None
    close(logits[2], whole[0][2][12:])


def test_kept_features_continue_where_the_lower_segment_stopped(model, whole):
    steps = new_steps(model, num_feature_slots=40)
    slots = np.arange(30, 17, -1, dtype=np.int32)
    first = replace(steps.rows(0, [(0, 0, 13)]), save_features=slots)
    steps.execute([(0, 0, 13)], [first, None, None])
    # The deeper segments catch up in a later step; only its last token runs through segment 0.
    below = steps.rows(0, [(0, 12, 13)])
    source = [*(-1 - slots[:12]), 0]
    deep = [steps.rows(1, [(0, 0, 13)], source), steps.rows(2, [(0, 0, 13)])]
    logits = steps.execute([(0, 12, 13)], [below, *deep]).logits
    close(logits[1], whole[0][1])
    close(logits[2], whole[0][2])


def test_features_are_kept_only_where_asked(model):
    steps = new_steps(model, num_feature_slots=8)
    slots = np.array([-1, 5, -1], np.int32)
    first = replace(steps.rows(0, [(0, 0, 3)]), save_features=slots)
    steps.execute([(0, 0, 3)], [first, None, None])
    kept = steps.engine.features[0].abs().sum(-1) > 0
    assert kept.nonzero().ravel().tolist() == [5]
    assert not steps.engine.features[1].any()


def test_row_without_a_slot_reads_what_is_there_and_writes_nothing(model, whole):
    steps = new_steps(model)
    steps.step((0, 0, 13))
    before = [c.clone() for c in (*steps.engine.key_cache, *steps.engine.value_cache)]
    item = (0, 4, 13)
    rows = [steps.rows(s, [item]) for s in range(3)]
    rows = [replace(r, slot_mapping=np.full_like(r.slot_mapping, -1)) for r in rows]
    logits = steps.execute([item], rows).logits
    close(logits[2], whole[0][2][4:])
    wrong = steps.engine.execute(StepInput(np.zeros(9, np.int32), tuple(rows)))
    assert np.abs(wrong.logits[2] - whole[0][2][4:]).max() > 1e-3
    after = [*steps.engine.key_cache, *steps.engine.value_cache]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_null_frame_is_never_written(model):
    steps = new_steps(model)
    steps.step((0, 0, 13), (1, 0, 5))
    assert not any(c[0].any() for c in (*steps.engine.key_cache, *steps.engine.value_cache))


@pytest.mark.parametrize("exits", [(4,), (2, 4), (1, 2, 4), (1, 4)])
def test_layer_groups_change_where_keys_lie_and_nothing_else(model, whole, exits):
    other = tiny_model(tiny_family(exits))
    other.exits["4"].norm.weight.copy_(model.exits["4"].norm.weight)
    steps = new_steps(other)
    steps.step((0, 0, 7), (1, 0, 2))
    close(steps.step((0, 7, 13))[-1], whole[0][2][7:])


@pytest.mark.parametrize(("window", "sees_start"), [(3, False), (8, True), (None, True)])
def test_sliding_window_hides_what_lies_before_it(window, sees_start):
    # Two layers with a window of 3 reach 4 tokens back; with one of 8 they reach the start.
    layers = (0, 1) if window else ()
    family = tiny_family((1, 2), sliding_window=window, windowed_layers=layers)
    steps = new_steps(tiny_model(family))
    before = steps.step((0, 0, 13))[-1][-1]
    changed = IDS[0].copy()
    changed[:8] = (changed[:8] + 1) % 61
    rows = tuple(steps.rows(s, [(0, 0, 13)]) for s in range(2))
    after = steps.engine.execute(StepInput(changed[:13], rows)).logits[-1][-1]
    assert (np.abs(after - before).max() > 1e-6) == sees_start


@pytest.mark.parametrize("window", [1, 3, 4, 5])
def test_sliding_window_is_the_same_in_chunks(window):
    family = tiny_family((1, 3), sliding_window=window, windowed_layers=(0, 2))
    model = tiny_model(family)
    whole = new_steps(model).step((0, 0, 16))[-1]
    steps = new_steps(model)
    parts = [steps.step((0, a, b))[-1] for a, b in [(0, 5), (5, 6), (6, 7), (7, 16)]]
    close(np.concatenate(parts), whole)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.7)], ids=["fp32", "bf16"]
)
def test_narrow_dtypes_come_close_and_give_float32_logits(model, whole, dtype, tolerance):
    steps = new_steps(tiny_model(tiny_family((1, 2, 4)), dtype))
    steps.step((0, 0, 7))
    logits = steps.step((0, 7, 13))[2]
    assert logits.dtype == np.float32
    close(logits, whole[0][2][7:], tolerance)
    assert steps.engine.key_cache[0].dtype == dtype


def test_float64_engine_gives_float64_logits(whole):
    assert whole[0][2].dtype == np.float64


def test_logits_stay_valid_after_the_next_step(model, whole):
    steps = new_steps(model)
    rows = [steps.rows(s, [(0, 0, 13)]) for s in range(3)]
    logits = steps.execute([(0, 0, 13)], rows).logits[2]
    steps.step((1, 0, 13))
    close(logits, whole[0][2])


def test_arena_has_the_bytes_that_its_spec_says(model):
    engine = tiny_engine(model, num_frames=10)
    tensors = [*engine.key_cache, *engine.value_cache]
    assert sum(t.nbytes for t in tensors) == engine.kv_spec.nbytes


def test_closed_engine_holds_no_arena(model):
    engine: ReferenceEngine = tiny_engine(model)
    engine.close()
    assert not engine.key_cache and not engine.value_cache and not engine.features
