"""Padded arrays of TensorRT plans: each row once, at its place, and nothing beyond a limit."""

import numpy as np
import pytest

from mfs_trt.engine.interface import EngineLimits, KVCacheSpec, SegmentInput
from mfs_trt.engine.tensorrt_inputs import (
    MAX_LANE_WIDTH,
    attention_inputs,
    make_inputs,
    num_scratch_frames,
    write_inputs,
)
from mfs_trt.errors import EngineError
from packed_rows import packed_rows

BLOCK_SIZE = 4
NUM_FRAMES, NUM_SCRATCH = 240, 8


def inputs_of(rows: SegmentInput) -> dict[str, np.ndarray]:
    return attention_inputs(rows, NUM_FRAMES, NUM_SCRATCH, BLOCK_SIZE)


def test_all_arrays_are_int32():
    arrays = inputs_of(packed_rows([(0, 5), (3, 4)], m=2))
    assert {array.dtype for array in arrays.values()} == {np.dtype(np.int32)}


def test_decoding_requests_have_one_lane_of_one_query_each():
    arrays = inputs_of(packed_rows([(6, 7), (3, 4), (0, 1)]))
    assert arrays["lane_rows"].tolist() == [[0], [1], [2]]
    assert arrays["lane_positions"].tolist() == [[6], [3], [0]]
    assert arrays["row_queries"].tolist() == [0, 1, 2]
    assert arrays["key_positions"].tolist() == list(range(8))
    assert arrays["lane_lengths"].tolist() == [7, 4, 1]
    assert arrays["block_tables.0"].tolist() == [[1, 2], [11, 12], [21, 22]]


def test_shorter_requests_are_padded_with_row_and_position_0():
    arrays = inputs_of(packed_rows([(2, 5), (7, 8)]))
    assert arrays["lane_rows"].tolist() == [[0, 1, 2], [3, 0, 0]]
    assert arrays["lane_positions"].tolist() == [[2, 3, 4], [7, 0, 0]]
    assert arrays["row_queries"].tolist() == [0, 1, 2, 3]


def test_long_request_takes_several_lanes_of_its_own_blocks():
    size = 2 * MAX_LANE_WIDTH + 2
    arrays = inputs_of(packed_rows([(0, size), (5, 6)], stride=50))
    assert arrays["lane_rows"].shape == (4, MAX_LANE_WIDTH)
    assert arrays["lane_rows"][2, :3].tolist() == [size - 2, size - 1, 0]
    assert arrays["lane_rows"][3, 0] == size
    assert (arrays["block_tables.0"][:3] == arrays["block_tables.0"][0]).all()
    assert arrays["block_tables.0"][3, 0] == 51
    assert arrays["lane_lengths"].tolist() == [size, size, size, 6]


@pytest.mark.parametrize("seed", range(20))
def test_every_row_is_found_in_its_padded_query(seed):
    random = np.random.default_rng(seed)
    firsts, counts = random.integers(0, 9, 3), random.integers(1, 3 * MAX_LANE_WIDTH, 3)
    items = [(a, a + n) for a, n in zip(firsts, counts, strict=True)]
    rows = packed_rows(items, stride=60)
    arrays = inputs_of(rows)
    queries = arrays["row_queries"]
    assert arrays["lane_rows"].ravel()[queries].tolist() == list(range(rows.num_rows))
    assert arrays["lane_positions"].ravel()[queries].tolist() == rows.positions.tolist()


def written(arrays: dict[str, np.ndarray], group: int = 0) -> dict[int, int]:
    """Slot → row, by the rule of the cache update."""
    starts, offsets = arrays[f"frame_row_starts.{group}"], arrays[f"frame_offsets.{group}"]
    order = arrays[f"rows_by_frame.{group}"]
    return {
        int(frame * BLOCK_SIZE + offsets[frame] + i): int(order[starts[frame] + i])
        for frame in range(len(offsets))
        for i in range(starts[frame + 1] - starts[frame])
    }


def test_rows_are_written_to_the_slots_of_their_layer_group():
    rows = packed_rows([(2, 9), (0, 1), (3, 4)], m=2)
    arrays = inputs_of(rows)
    for group in range(2):
        slots = rows.slot_mapping[:, group].tolist()
        assert written(arrays, group) == {slot: row for row, slot in enumerate(slots)}


def test_rows_that_exist_already_are_written_behind_the_arena():
    slots = np.array([-1, -1, 22, 23, -1, -1, -1, 8])
    arrays = write_inputs(slots, NUM_FRAMES, NUM_SCRATCH, BLOCK_SIZE)
    where = written({f"{name}.0": array for name, array in arrays.items()})
    first = (NUM_FRAMES - NUM_SCRATCH) * BLOCK_SIZE
    assert where == {
        **{8: 7, 22: 2, 23: 3},
        **{first + i: row for i, row in enumerate((0, 1, 4, 5, 6))},
    }


def test_slots_with_a_gap_in_a_frame_are_refused():
    with pytest.raises(AssertionError, match="new slots of a frame have a gap"):
        write_inputs(np.array([8, 10]), NUM_FRAMES, NUM_SCRATCH, BLOCK_SIZE)


@pytest.mark.parametrize(("num_tokens", "expected"), [(1, 1), (4, 1), (5, 2), (512, 128)])
def test_scratch_frames_hold_a_whole_step(num_tokens, expected):
    limits = EngineLimits(max_num_batched_tokens=num_tokens)
    assert num_scratch_frames(limits, BLOCK_SIZE) == expected


# -- the two ways --------------------------------------------------------------------------------

LIMITS = EngineLimits(max_num_batched_tokens=NUM_SCRATCH * BLOCK_SIZE)
KV_SPEC = KVCacheSpec(1, (2,), 2, 16, BLOCK_SIZE, 1024, NUM_FRAMES - NUM_SCRATCH)


def test_portable_plans_are_given_padded_arrays_and_frames_behind_the_arena():
    rows = packed_rows([(0, 5), (3, 4)], m=2)
    inputs, expected = make_inputs("portable", LIMITS, KV_SPEC), inputs_of(rows)
    given = inputs.segment(rows)
    assert inputs.num_scratch_frames == NUM_SCRATCH
    assert given.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(given[name], array)


def test_plugins_are_given_packed_rows_as_they_are_and_no_frames():
    rows = packed_rows([(0, 5), (3, 11), (1, 2)], m=2)
    inputs = make_inputs("plugin", LIMITS, KV_SPEC)
    given = inputs.segment(rows)
    assert inputs.num_scratch_frames == 0
    assert {array.dtype for array in given.values()} == {np.dtype(np.int32)}
    assert given["query_start_loc"].tolist() == [0, 5, 13, 14]
    assert given["seq_lens"].tolist() == [5, 11, 2]
    np.testing.assert_array_equal(given["slot_mapping"], rows.slot_mapping)
    np.testing.assert_array_equal(given["block_tables"], rows.block_tables)
    assert given["block_tables"].shape == (3, 3, 2)


@pytest.mark.parametrize(("num_blocks", "expected"), [(None, 2), (3, 3)])
def test_plugins_are_given_as_many_blocks_as_the_longest_request_has_or_as_asked(
    num_blocks, expected
):
    rows = packed_rows([(0, 5), (3, 11)])
    short = SegmentInput(**{**vars(rows), "seq_lens": np.array([5, 8], np.int32)})
    given = make_inputs("plugin", LIMITS, KV_SPEC).segment(short, num_blocks)
    assert given["block_tables"].shape == (2, expected, 1)


def test_plans_that_attend_in_an_unknown_way_are_refused():
    with pytest.raises(
        EngineError, match="attention: expected portable, plugin, .* got 'telepathy'"
    ):
        make_inputs("telepathy", LIMITS, KV_SPEC)
