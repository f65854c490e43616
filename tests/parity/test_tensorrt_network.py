"""The TensorRT network definitions give the reference engine's numbers, evaluated on the CPU."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from mfs_trt.builder.emitters.tensorrt import TensorRtEmitter
from mfs_trt.builder.emitters.tensorrt_portable import PortableAttention
from mfs_trt.engine import load_engine
from mfs_trt.engine.interface import EngineLimits
from parity_families import FAMILIES, PLAIN
from random_steps import RandomSteps
from steps import Steps, close, num_ties
from tensorrt_rig import evaluated_engine, rtx_config
from tensorrt_walks import (
    FAULTY,
    IDS,
    LIMITS,
    TOLERANCE,
    error_of_a_walk,
    largest_error,
    with_features,
)
from tiny_folders import build_tiny_engine, write_tiny_family


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A function `family name -> family folder`."""
    written = {}

    def get(name: str):
        if name not in written:
            folder = tmp_path_factory.mktemp("family") / "f"
            written[name] = write_tiny_family(folder, FAMILIES[name])
        return written[name]

    return get


@pytest.fixture(scope="module")
def engines(folders, tmp_path_factory):
    """A function `(family name, target, **settings) -> engine`; each is made once."""
    made = {}

    def get(name: str, target: str, **settings):
        key = (name, target, repr(settings))
        if key not in made:
            if target == "reference":
                out = tmp_path_factory.mktemp("engine") / "e"
                engine = load_engine(build_tiny_engine(folders(name), out, target, **settings))
            else:
                config = rtx_config(**{"target": target, "limits": LIMITS, **settings})
                engine = evaluated_engine(folders(name), config)
            made[key] = with_features(engine)
        return made[key]

    return get


@pytest.fixture(scope="module", params=["tensorrt-rtx", "tensorrt"])
def target(request) -> str:
    """Native layers, and plugins."""
    return request.param


@pytest.fixture(scope="module")
def both(engines, target):
    """A function `family name -> (reference, tensorrt)` steps of six requests."""

    def get(name: str):
        return tuple(Steps(engines(name, t), IDS) for t in ("reference", target))

    return get


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", FAMILIES)
def test_random_steps_equal_the_reference(both, name, seed):
    reference, tensorrt = both(name)
    walk = RandomSteps(reference, seed)
    num_rows = ties = 0
    while not walk.is_done:
        step = walk.next()
        expected, actual = (s.engine.execute(step) for s in (reference, tensorrt))
        assert largest_error(expected.logits, actual.logits) < TOLERANCE
        assert largest_error(expected.top_logits, actual.top_logits) < TOLERANCE
        for theirs, ids in zip(expected.logits, actual.token_ids, strict=True):
            if theirs is not None:
                ties += num_ties(theirs, ids)
                num_rows += len(ids)
    assert num_rows > 100
    assert ties <= 1, f"{ties} argmax ties in {num_rows} rows"
    for theirs, ours in zip(reference.engine.features, tensorrt.engine.features, strict=True):
        assert theirs.abs().sum(1).all(), "every token of every request was kept"
        close(ours.numpy(), theirs.numpy(), TOLERANCE)


@pytest.mark.parametrize("name", FAMILIES)
def test_arena_holds_the_keys_and_values_of_the_reference(both, name):
    reference, tensorrt = both(name)
    for steps in (reference, tensorrt):
        steps.step((0, 0, 64), (1, 0, 33))
        steps.step((0, 64, 128), (1, 33, 64))
    caches = zip(reference.engine.key_cache, reference.engine.value_cache, strict=True)
    frames = np.unique(np.concatenate([[0], *(t[:2].ravel() for t in reference.tables)]))
    for theirs, ours in zip(caches, tensorrt.engine.arena, strict=True):
        for a, b in zip(theirs, ours, strict=True):
            close(b.numpy()[frames], a.numpy()[frames], TOLERANCE)
            assert not b[0].any(), "the null frame was written"


@pytest.mark.parametrize("size", [1, 31, 32, 33, 63, 64, 65, 127, 128])
def test_prompt_of_an_awkward_size_equals_the_reference(both, size):
    reference, tensorrt = both(PLAIN)
    items = [(0, 0, size), (1, 0, 1), (2, 0, min(128, size + 3))]
    expected, actual = (steps.step(*items, tiers=(2, 1, 0)) for steps in (reference, tensorrt))
    assert largest_error(expected, actual) < TOLERANCE


@pytest.mark.parametrize("block_size", [1, 5, 16])
def test_any_block_size_equals_the_reference(folders, tmp_path, target, block_size):
    settings = {"block_size": block_size, "limits": EngineLimits(8, 256, 128)}
    ids = IDS[:, :120] if block_size == 5 else IDS
    name = "qwen2, some windows, own heads, m = 1, 3"
    built = build_tiny_engine(folders(name), tmp_path / "e", "reference", **settings)
    config = rtx_config(target=target, **settings)
    both = load_engine(built), evaluated_engine(folders(name), config)
    reference, tensorrt = (Steps(engine, ids) for engine in both)
    for items in ([(0, 0, 70), (1, 0, 2)], [(1, 2, 3), (0, 70, 71)], [(0, 71, 120), (1, 3, 9)]):
        assert largest_error(reference.step(*items), tensorrt.step(*items)) < TOLERANCE


def test_rows_that_exist_already_change_no_byte_of_the_arena(engines, target):
    steps = Steps(engines(PLAIN, target), IDS)
    whole = steps.step((0, 0, 100))
    num_frames = steps.engine.kv_spec.num_frames
    before = [t[:num_frames].clone() for pair in steps.engine.arena for t in pair]
    segments = [steps.rows(s, [(0, 30, 71)]) for s in range(3)]
    exists = [replace(rows, slot_mapping=np.full_like(rows.slot_mapping, -1)) for rows in segments]
    again = steps.execute([(0, 30, 71)], exists).logits
    assert largest_error([rows[30:71] for rows in whole], again) < TOLERANCE
    after = [t[:num_frames] for pair in steps.engine.arena for t in pair]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_what_others_left_in_the_arena_reaches_no_row(folders, engines, target):
    reference = Steps(engines(PLAIN, "reference"), IDS)
    config = rtx_config(target=target, limits=LIMITS)
    tensorrt = Steps(evaluated_engine(folders(PLAIN), config), IDS)
    for pair in tensorrt.engine.arena:
        for tensor in pair:
            tensor.fill_(np.nan)
    for items in ([(0, 0, 40), (1, 0, 3)], [(1, 3, 4), (0, 40, 41)], [(0, 41, 128), (2, 0, 5)]):
        assert largest_error(reference.step(*items), tensorrt.step(*items)) < TOLERANCE


def test_float16_networks_come_close_to_the_reference(engines, target):
    name = "qwen3, tied head, m = 1"
    reference = Steps(engines(name, "reference"), IDS)
    tensorrt = Steps(engines(name, target, dtype="float16"), IDS)
    for items in ([(0, 0, 65), (1, 0, 2)], [(0, 65, 66), (1, 2, 40)]):
        expected, actual = reference.step(*items)[-1], tensorrt.step(*items)[-1]
        error = np.sqrt(np.mean((actual - expected) ** 2)) / expected.std()
        assert 1e-5 < error < 0.02


# -- seeded faults -------------------------------------------------------------------------------

_original = {
    name: getattr(owner, name)
    for owner in (PortableAttention, TensorRtEmitter)
    for name in dir(owner)
    if not name.startswith("__")
}


def _square_matrices_not_transposed(emit, x, weight, bias):
    if weight.shape[0] == weight.shape[1]:
        weight = emit.shuffle(weight, before=(1, 0))
    return _original["linear"](emit, x, weight, bias)


def _missing_bias(emit, x, weight, bias):
    return _original["linear"](emit, x, weight, None)


def _missing_residual(emit, a, b):
    return _original["add"](emit, a, b) if b.shape[0] == 1 else b  # a bias has one row


def _wrong_eps(emit, x, gain, eps):
    return _original["rms_norm"](emit, x, gain, 1000 * eps)


def _swapped_gate_and_up(emit, x, gate, up, has_bias):
    return _original["swiglu"](emit, x, up, gate, has_bias)


def _swapped_sine_and_cosine(emit, x, cos, sin):
    return _original["rotary_embedding"](emit, x, sin, cos)


def _next_position_pairs(emit, x, cos, sin):
    """Pairs (2i, 2i + 1) in place of (i, i + d/2)."""
    add = emit.network.add_rotary_embedding
    num_heads, head_dim = x.shape[1], x.shape[2]
    sequence = emit.shuffle(x, shape=(1, -1, num_heads, head_dim), after=(0, 2, 1, 3))
    cos, sin = (emit.shuffle(t, shape=(1, -1, head_dim // 2)) for t in (cos, sin))
    y = add(sequence, cos, sin, True, head_dim).get_output(0)
    return emit.shuffle(y, before=(0, 2, 1, 3), shape=(-1, num_heads, head_dim))


def _unscaled(emit, value, dtype, rank):
    return _original["scalar"](emit, 1.0 if abs(value - 0.25) < 1e-9 else value, dtype, rank)


def _window_one_wider(attention, window):
    return _original["_mask"](attention, None if window is None else window + 1)


def _no_window(attention, window):
    return _original["_mask"](attention, None)


def _mask_sees_one_key_less(emit, name, dtype, shape):
    tensor = _original["input"](emit, name, dtype, shape)
    if name != "key_positions":
        return tensor
    one = emit.scalar(1, torch.int32, 1)
    return emit.elementwise(tensor, one, emit.trt.ElementWiseOperation.SUB)


def _tables_of_the_first_group(emit, name, dtype, shape):
    tensor = _original["input"](emit, name, dtype, shape)
    if name.startswith("block_tables."):
        return _original["input"](emit, "block_tables.0", dtype, shape)
    return tensor


def _heads_grouped_in_turn(emit, query, key, value, **where):
    """Query heads 0, 2, 4, … share the first KV head."""
    num_heads, head_dim = emit._family.model.num_heads, emit._family.model.head_dim
    pairs = emit.shuffle(query, shape=(-1, num_heads // 2, 2, head_dim))
    query = emit.shuffle(pairs, before=(0, 2, 1, 3), shape=(-1, num_heads * head_dim))
    return _original["paged_attention"](emit, query, key, value, **where)


def _keys_written_for_values(emit, query, key, value, **where):
    return _original["paged_attention"](emit, query, key, key, **where)


def _features_one_slot_off(emit, below, features, rows):
    one = emit.scalar(1, torch.int32, 1)
    shifted = emit.elementwise(rows, one, emit.trt.ElementWiseOperation.SUB)
    return _original["source_rows"](emit, below, features, shifted)


FAULTS = {
    "matrices not transposed": (TensorRtEmitter, "linear", _square_matrices_not_transposed),
    "biases missing": (TensorRtEmitter, "linear", _missing_bias),
    "residual missing": (TensorRtEmitter, "add", _missing_residual),
    "norm's epsilon": (TensorRtEmitter, "rms_norm", _wrong_eps),
    "gate and up swapped": (TensorRtEmitter, "swiglu", _swapped_gate_and_up),
    "sine and cosine swapped": (TensorRtEmitter, "rotary_embedding", _swapped_sine_and_cosine),
    "rotary pairs interleaved": (TensorRtEmitter, "rotary_embedding", _next_position_pairs),
    "attention's scale": (TensorRtEmitter, "scalar", _unscaled),
    "window one wider": (PortableAttention, "_mask", _window_one_wider),
    "no window": (PortableAttention, "_mask", _no_window),
    "mask one key off": (TensorRtEmitter, "input", _mask_sees_one_key_less),
    "block tables of another layer group": (TensorRtEmitter, "input", _tables_of_the_first_group),
    "query heads grouped in turn": (TensorRtEmitter, "paged_attention", _heads_grouped_in_turn),
    "keys written for values": (TensorRtEmitter, "paged_attention", _keys_written_for_values),
    "features one slot off": (TensorRtEmitter, "source_rows", _features_one_slot_off),
}


@pytest.fixture(scope="module")
def faulty_folder(tmp_path_factory):
    return write_tiny_family(tmp_path_factory.mktemp("family") / "f", FAULTY)


@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_fault_in_the_network_is_noticed(faulty_folder, tmp_path, monkeypatch, fault):
    built = build_tiny_engine(faulty_folder, tmp_path / "e", "reference")
    reference = Steps(with_features(load_engine(built)), IDS)
    if fault is not None:
        monkeypatch.setattr(*FAULTS[fault])
    tensorrt = Steps(with_features(evaluated_engine(faulty_folder, rtx_config(limits=LIMITS))), IDS)
    error = error_of_a_walk(reference, tensorrt)
    assert error < TOLERANCE if fault is None else error > 20 * TOLERANCE, error
