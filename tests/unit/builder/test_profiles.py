"""Every step within the limits fits a profile: decode steps the first, all steps the second."""

import numpy as np
import pytest

from mfs_trt.builder.profiles import make_profiles
from mfs_trt.engine.interface import EngineLimits
from mfs_trt.engine.tensorrt_inputs import MAX_LANE_WIDTH, attention_inputs
from packed_rows import packed_rows

ROWS = {"input_ids": (-1,), "positions": (-1,)}
PORTABLE = {
    **ROWS,
    "lane_rows": (-1, -1),
    "lane_positions": (-1, -1),
    "lane_lengths": (-1,),
    "row_queries": (-1,),
    "key_positions": (-1,),
    "block_tables.0": (-1, -1),
    "rows_by_frame.0": (-1,),
}
PLUGIN = {
    **ROWS,
    "slot_mapping": (-1, 1),
    "block_tables": (-1, -1, 1),
    "query_start_loc": (-1,),
    "seq_lens": (-1,),
}


def fits(profile, arrays, dynamic=PORTABLE) -> bool:
    for name, shape in dynamic.items():
        least, _, greatest = profile.shapes(name, shape)
        pairs = zip(least, arrays[name].shape, greatest, strict=True)
        if not all(a <= b <= c for a, b, c in pairs):
            return False
    return True


def step_arrays(counts, lengths, block_size):
    """Arrays of a step in which request r computes the last `counts[r]` of `lengths[r]` tokens."""
    items = [(length - n, length) for n, length in zip(counts, lengths, strict=True)]
    stride = -(-max(lengths) // block_size)
    rows = packed_rows(items, block_size=block_size, stride=stride)
    num_scratch = -(-rows.num_rows // block_size)
    arrays = attention_inputs(rows, 1 + stride * len(items) + num_scratch, num_scratch, block_size)
    arrays |= {name: getattr(rows, name) for name in PLUGIN.keys() - ROWS.keys()}
    return {**arrays, "positions": rows.positions, "input_ids": rows.source_rows}


@pytest.mark.parametrize(
    "limits",
    [
        EngineLimits(64, 512, 2048),
        EngineLimits(1, 1, 1),
        EngineLimits(8, 4, 100),
        EngineLimits(3, 200, 300),
        EngineLimits(70, 130, 64),
    ],
)
def test_random_steps_at_the_limits_fit(limits):
    sizes = {"block_size": 16, "num_tiers": 3, "num_slots": 640}
    decode, prefill = make_profiles(limits, **sizes, attention="portable")
    packed_decode, packed_prefill = make_profiles(limits, **sizes, attention="plugin")
    random = np.random.default_rng(0)
    max_num_reqs = min(limits.max_num_seqs, limits.max_num_batched_tokens)
    for _ in range(50):
        num_reqs = int(random.integers(1, max_num_reqs + 1))
        left, counts = limits.max_num_batched_tokens - num_reqs, np.ones(num_reqs, int)
        if random.random() < 0.7:
            for r in random.permutation(num_reqs)[: random.integers(0, 4)]:
                extra = min(left, limits.max_model_len - 1)
                counts[r] += extra if random.random() < 0.5 else random.integers(0, extra + 1)
                left -= counts[r] - 1
        lengths = [random.integers(n, limits.max_model_len + 1) for n in counts]
        arrays = step_arrays(counts, lengths, 16)
        assert fits(prefill, arrays)
        assert fits(decode, arrays) == (counts.max() == 1)
        assert fits(packed_prefill, arrays, PLUGIN)
        assert fits(packed_decode, arrays, PLUGIN) == (counts.sum() <= max_num_reqs)


def test_longest_contexts_are_the_greatest_shapes():
    for profile in make_profiles(
        EngineLimits(4, 8, 100), block_size=16, num_tiers=2, num_slots=640, attention="portable"
    ):
        assert profile.shapes("key_positions", (-1,))[2] == (7 * 16,)
        assert profile.shapes("block_tables.3", (-1, -1))[2][1] == 7


def test_least_fastest_and_greatest_shapes_are_in_order():
    for limits in (EngineLimits(), EngineLimits(1, 1, 1), EngineLimits(300, 5, 7)):
        for profile in make_profiles(
            limits, block_size=32, num_tiers=3, num_slots=640, attention="portable"
        ):
            for least, fastest, greatest in profile.ranges.values():
                assert 1 <= least <= fastest <= greatest


def test_prefill_is_fastest_at_full_lanes_and_decode_at_one_query():
    decode, prefill = make_profiles(
        EngineLimits(64, 512, 2048), block_size=32, num_tiers=1, num_slots=640, attention="portable"
    )
    assert decode.ranges["width"] == (1, 1, 1)
    assert prefill.shapes("lane_rows", (-1, -1))[1] == (512 // MAX_LANE_WIDTH, MAX_LANE_WIDTH)


def test_static_shapes_are_kept():
    (profile, _) = make_profiles(
        EngineLimits(), block_size=32, num_tiers=2, num_slots=640, attention="portable"
    )
    assert profile.shapes("key_cache.0.1", (7, 2, 32, 16)) == ((7, 2, 32, 16),) * 3
    assert profile.shapes("below", (-1, 40))[2] == (512, 40)


def test_head_takes_all_rows_of_all_tiers_and_gathers_those_that_leave():
    limits = EngineLimits(8, 64, 100)
    decode, prefill = make_profiles(
        limits, block_size=16, num_tiers=3, num_slots=640, attention="plugin"
    )
    assert decode.shapes("rows", (-1, 40))[2] == (3 * 64, 40)
    assert decode.shapes("exit_rows", (-1,))[2] == decode.shapes("tiers", (-1,))[2] == (8,)
    assert prefill.shapes("exit_rows", (-1,))[2] == (3 * 64,)
