"""The openvino engine gives the reference engine's numbers on the same step inputs."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from cpu_features import needs_bfloat16
from mfs_trt.engine import load_engine
from mfs_trt.engine.interface import Engine, EngineLimits
from mfs_trt.engine.reference import ReferenceEngine
from parity_families import FAMILIES, PLAIN
from random_steps import RandomSteps
from steps import Item, Steps, close, num_ties
from tiny_folders import build_tiny_engine, folder_family, write_tiny_family

TOLERANCE = 5e-5  # of fp32 logits and hidden states, whose standard deviation is 1 to 5
RANDOM = np.random.default_rng(0)
IDS = RANDOM.integers(0, 61, (6, 128)).astype(np.int32)
MANY_LIMITS = EngineLimits(max_num_seqs=65, max_num_batched_tokens=130, max_model_len=64)
MANY_IDS = RANDOM.integers(0, 61, (65, 64)).astype(np.int32)

KV_DTYPES = [
    ("float32", ""),
    ("float32", "uint8"),
    pytest.param("bfloat16", "", marks=needs_bfloat16),
    pytest.param("bfloat16", "uint8", marks=needs_bfloat16),
]


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """A function `(family name, **settings) -> engine`; each is built once for all tests."""
    folders, built = {}, {}

    def get(name: str, target: str = "openvino", **settings) -> Engine:
        key = (name, target, repr(settings))
        if key not in built:
            if name not in folders:
                folder = tmp_path_factory.mktemp("family") / "f"
                folders[name] = write_tiny_family(folder, FAMILIES[name])
            out = tmp_path_factory.mktemp("engine") / "e"
            engine = load_engine(build_tiny_engine(folders[name], out, target, **settings))
            built[key] = with_features(engine, IDS.size)
        return built[key]

    return get


def with_features(engine: Engine, num_slots: int) -> Engine:
    """Gives each boundary a pool of kept hidden states."""
    library = torch if isinstance(engine, ReferenceEngine) else np
    size = (num_slots, engine.family.model.hidden_size)
    engine.features = [library.zeros(size, dtype=f.dtype) for f in engine.features]
    return engine


@pytest.fixture(scope="module")
def both(engines):
    """A function `family name -> (reference, openvino)` steps of six requests, in fp32."""

    def get(name: str) -> tuple[Steps, Steps]:
        return tuple(Steps(engines(name, target), IDS) for target in ("reference", "openvino"))

    return get


def snapshot(steps: Steps) -> list[np.ndarray]:
    """Copies of the arena's tensors."""
    num_frames = steps.engine.kv_spec.num_frames
    return [t.array[:num_frames].copy() for tensors in steps.engine.arena for t in tensors]


def changed_frames(before: list[np.ndarray], after: list[np.ndarray]) -> set[int]:
    return {
        int(frame)
        for old, new in zip(before, after, strict=True)
        for frame in np.flatnonzero((old != new).reshape(len(old), -1).any(axis=1))
    }


def same_logits(reference: Steps, openvino: Steps, *items, tiers=None) -> int:
    """Runs a step on both; returns the number of argmax ties."""
    expected = reference.step(*items, tiers=tiers)
    actual = openvino.step(*items, tiers=tiers)
    ties = 0
    for theirs, ours in zip(expected, actual, strict=True):
        assert (theirs is None) == (ours is None)
        if theirs is not None:
            close(ours, theirs, TOLERANCE)
            ties += num_ties(theirs, ours.argmax(axis=1))
    return ties


def segments_of(steps: Steps, items: Sequence[Item], first_new: Sequence[int]):
    """Rows of `items`; in item i those before token `first_new[i]` exist already."""
    segments = []
    for s in range(len(steps.tables)):
        rows = steps.rows(s, items)
        is_new = rows.positions >= np.repeat(first_new, np.diff(rows.query_start_loc))
        slots = np.where(is_new[:, None], rows.slot_mapping, np.int32(-1))
        segments.append(replace(rows, slot_mapping=slots))
    return segments


def share_blocks(steps: Steps, owner: int, reader: int, num_blocks: int) -> Steps:
    """The same engine, where the reader's first blocks are the owner's."""
    shared = Steps(steps.engine, steps.ids.copy())
    for table in shared.tables:
        table[reader, :num_blocks] = table[owner, :num_blocks]
    num_tokens = num_blocks * steps.block_size
    shared.ids[reader, :num_tokens] = shared.ids[owner, :num_tokens]
    return shared


# -- the same numbers as the reference -----------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", FAMILIES)
def test_random_steps_equal_the_reference(both, name, seed):
    reference, openvino = both(name)
    walk = RandomSteps(reference, seed)
    num_rows = ties = 0
    while not walk.is_done:
        step = walk.next()
        expected, actual = (s.engine.execute(step) for s in (reference, openvino))
        for s, rows in enumerate(step.segments):
            if rows is None or not len(rows.exit_rows):
                assert actual.logits[s] is actual.token_ids[s] is actual.top_logits[s] is None
                continue
            close(actual.logits[s], expected.logits[s], TOLERANCE)
            close(actual.top_logits[s], expected.top_logits[s], TOLERANCE)
            ties += num_ties(expected.logits[s], actual.token_ids[s])
            num_rows += len(rows.exit_rows)
    assert num_rows > 100
    assert ties <= 1, f"{ties} argmax ties in {num_rows} rows"
    for theirs, ours in zip(reference.engine.features, openvino.engine.features, strict=True):
        assert theirs.abs().sum(1).all(), "every token of every request was kept"
        close(ours, theirs.numpy(), TOLERANCE)


@pytest.mark.parametrize("name", FAMILIES)
def test_arena_holds_the_keys_and_values_of_the_reference(both, name):
    reference, openvino = both(name)
    for steps in (reference, openvino):
        steps.step((0, 0, 64), (1, 0, 33))
        steps.step((0, 64, 128), (1, 33, 64))
    caches = zip(reference.engine.key_cache, reference.engine.value_cache, strict=True)
    frames = np.unique(np.concatenate([[0], *(t[0].ravel() for t in reference.tables)]))
    for theirs, ours in zip(caches, openvino.engine.arena, strict=True):
        for a, b in zip(theirs, ours, strict=True):
            close(b.array[frames], a.numpy()[frames], TOLERANCE)
            assert not b.array[0].any(), "the null frame was written"


@pytest.mark.parametrize("size", [1, 31, 32, 33, 63, 64, 65, 127, 128])
def test_prompt_of_an_awkward_size_equals_the_reference(both, size):
    reference, openvino = both(PLAIN)
    assert same_logits(reference, openvino, (0, 0, size)) == 0
    assert size == 128 or same_logits(reference, openvino, (0, size, size + 1)) == 0


@pytest.mark.parametrize("num_requests", [1, 2, 3, 31, 33, 64, 65])
def test_decoding_many_requests_of_all_tiers_equals_the_reference(engines, num_requests):
    settings = {"memory_nbytes": 64 << 20}
    both = [Steps(engines(PLAIN, t, **settings), MANY_IDS) for t in ("reference", "openvino")]
    lengths = [1 + (7 * r) % 63 for r in range(num_requests)]
    for r, length in enumerate(lengths):
        same_logits(*both, (r, 0, length))
    tiers = sorted((r % 3 for r in range(num_requests)), reverse=True)
    items = [(r, length, length + 1) for r, length in enumerate(lengths)]
    assert same_logits(*both, *items, tiers=tiers) == 0


@pytest.mark.parametrize("head_dim", [2, 6, 24, 40, 80])
def test_any_head_size_equals_the_reference(tmp_path, head_dim):
    family = write_tiny_family(tmp_path / "f", folder_family((1, 2), head_dim=head_dim))
    reference, openvino = (
        Steps(load_engine(build_tiny_engine(family, tmp_path / t, t)), IDS[:2])
        for t in ("reference", "openvino")
    )
    same_logits(reference, openvino, (0, 0, 45))
    same_logits(reference, openvino, (0, 45, 46), (1, 0, 7))


@pytest.mark.parametrize(("dtype", "kv_dtype"), KV_DTYPES[1:3])
def test_random_steps_with_narrow_caches_stay_close_to_the_reference(
    both, engines, dtype, kv_dtype
):
    reference, _ = both(PLAIN)
    engine = engines(PLAIN, dtype=dtype, kv_dtype=kv_dtype)
    walk = RandomSteps(reference, seed=7)
    while not walk.is_done:
        step = walk.next()
        expected, actual = reference.engine.execute(step), engine.execute(step)
        for theirs, ours in zip(expected.logits, actual.logits, strict=True):
            if theirs is not None:
                assert np.sqrt(np.mean((ours - theirs) ** 2)) < 0.1 * theirs.std()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_family_stored_in_a_narrow_dtype_equals_the_reference(tmp_path, dtype):
    spec = replace(FAMILIES[PLAIN], dtype=dtype)
    family = write_tiny_family(tmp_path / "f", spec, dtype)
    reference, openvino = (
        Steps(load_engine(build_tiny_engine(family, tmp_path / t, t)), IDS)
        for t in ("reference", "openvino")
    )
    same_logits(reference, openvino, (0, 0, 45), (1, 0, 3))


def test_segment_without_logits_still_feeds_the_next(both):
    reference, openvino = both(PLAIN)
    none, one = np.zeros(0, np.int32), np.array([12], np.int32)
    segments = [
        replace(reference.rows(s, [(0, 0, 13)]), exit_rows=exit_rows)
        for s, exit_rows in enumerate((none, none, one))
    ]
    expected, actual = (s.execute([(0, 0, 13)], segments).logits for s in (reference, openvino))
    assert actual[0] is None and actual[1] is None
    close(actual[2], expected[2], TOLERANCE)


def test_row_of_nan_has_a_top_logit_of_nan(engines):
    steps = Steps(engines(PLAIN), IDS)
    features = steps.engine.features[0]
    features[7] = np.nan
    rows = steps.rows(1, [(0, 0, 2)], source_rows=[-1 - 7, -1 - 8])
    rows = replace(rows, query_start_loc=np.array([0, 1, 2], np.int32))
    rows = replace(rows, seq_lens=np.array([1, 2], np.int32), block_tables=steps.tables[1][[0, 1]])
    output = steps.execute([], [None, rows, None])
    assert np.isnan(output.top_logits[1]).tolist() == [True, False]
    features[7] = 0


# -- rows that exist already ---------------------------------------------------------------------

each_kv_dtype = pytest.mark.parametrize(("dtype", "kv_dtype"), KV_DTYPES)


def rounding(dtype: str, kv_dtype: str) -> float:
    """What a change of the batch may change in a logit.

    8-bit keys are scaled over a block: with other tokens in it they are rounded otherwise.
    """
    return TOLERANCE if (dtype, kv_dtype) == ("float32", "") else 0.5


def own_frames(steps: Steps, request: int, block: int) -> set[int]:
    return {int(frame) for table in steps.tables for frame in table[request, block]}


@each_kv_dtype
@pytest.mark.parametrize("item", [(0, 0, 20), (0, 10, 20), (0, 30, 70), (0, 64, 96), (0, 99, 100)])
def test_rows_that_exist_already_change_no_byte_of_the_arena(engines, dtype, kv_dtype, item):
    steps = Steps(engines(PLAIN, dtype=dtype, kv_dtype=kv_dtype), IDS)
    whole = steps.step((0, 0, 100))
    before = snapshot(steps)
    again = steps.execute([item], segments_of(steps, [item], [100])).logits
    for theirs, ours in zip(whole, again, strict=True):
        close(ours, theirs[item[1] : item[2]], rounding(dtype, kv_dtype))
    assert changed_frames(before, snapshot(steps)) == set()


@each_kv_dtype
def test_reader_of_shared_blocks_sees_nothing_of_their_rows_run_again(engines, dtype, kv_dtype):
    steps = Steps(engines(PLAIN, dtype=dtype, kv_dtype=kv_dtype), IDS)
    steps.step((0, 0, 100))
    shared = share_blocks(steps, owner=0, reader=1, num_blocks=3)
    alone = shared.step((1, 96, 97))
    before = snapshot(shared)
    items = [(1, 96, 97), (0, 10, 20), (0, 40, 50)]
    mixed = shared.execute(items, segments_of(shared, items, [96, 100, 100])).logits
    for theirs, ours in zip(alone, mixed, strict=True):
        close(ours[:1], theirs, TOLERANCE if dtype == "float32" else 0.1)
    assert changed_frames(before, snapshot(shared)) <= own_frames(shared, 1, block=3)


@each_kv_dtype
def test_new_row_after_rows_that_exist_already_changes_its_own_block_only(engines, dtype, kv_dtype):
    steps = Steps(engines(PLAIN, dtype=dtype, kv_dtype=kv_dtype), IDS)
    whole = steps.step((0, 0, 71))
    steps.step((0, 0, 70))
    before = snapshot(steps)
    again = steps.execute([(0, 60, 71)], segments_of(steps, [(0, 60, 71)], [70])).logits
    for theirs, ours in zip(whole, again, strict=True):
        close(ours, theirs[60:], rounding(dtype, kv_dtype))
    changed = changed_frames(before, snapshot(steps))
    assert changed and changed <= own_frames(steps, 0, block=2)


def test_largest_step_of_rows_that_exist_already_fits_into_the_scratch_frames(engines):
    steps = Steps(engines(PLAIN, memory_nbytes=64 << 20, limits=MANY_LIMITS), MANY_IDS)
    for r in range(len(MANY_IDS)):
        steps.step((r, 0, 40))
    before = snapshot(steps)
    items = [(r, 31, 33) for r in range(len(MANY_IDS))]  # two blocks each
    steps.execute(items, segments_of(steps, items, [40] * len(items)))
    assert changed_frames(before, snapshot(steps)) == set()


# -- narrow numbers ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "tolerance"),
    [
        ({"kv_dtype": "uint8"}, 0.02),
        pytest.param({"dtype": "bfloat16"}, 0.04, marks=needs_bfloat16),
        pytest.param({"dtype": "bfloat16", "kv_dtype": "uint8"}, 0.05, marks=needs_bfloat16),
        ({"weight_format": "int8"}, 0.08),
        ({"weight_format": "int4"}, 0.6),
        ({"kv_dtype": "uint8", "weight_format": "int8"}, 0.08),
    ],
    ids=lambda value: "-".join(value.values()) if isinstance(value, dict) else "",
)
def test_narrow_numbers_come_close_to_fp32(engines, settings, tolerance):
    """`tolerance`: root mean square of the differences, over the spread of the logits."""
    name = "qwen3, tied head, m = 1"
    reference, openvino = (
        Steps(engines(name, "reference"), IDS),
        Steps(engines(name, **settings), IDS),
    )
    for items in ([(0, 0, 65)], [(1, 0, 31), (2, 0, 33)], [(0, 65, 66), (1, 31, 64), (2, 33, 34)]):
        expected, actual = reference.step(*items)[-1], openvino.step(*items)[-1]
        error = np.sqrt(np.mean((actual - expected) ** 2)) / expected.std()
        assert 1e-5 < error < tolerance, error
