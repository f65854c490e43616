"""`prepare` on steps small enough to compute by hand."""

from types import SimpleNamespace

import numpy as np
import pytest

from mfs_trt.engine.interface import NULL_FRAME
from mfs_trt.scheduler.batch import prepare
from mfs_trt.scheduler.output import SchedulerOutput, SegmentItems


def items(
    *entries: tuple[int, int, int],
    exits: tuple[int, ...] = (),
    exit_counts: tuple[int, ...] | None = None,
    stored_from: tuple[int, ...] | None = None,
    saved_from: tuple[int, ...] | None = None,
) -> SegmentItems:
    """Entries are (table row, first token, last token)."""
    rows, first, last = np.array(entries, np.int32).T
    counts = exit_counts or (1,) * len(exits)
    stored = first if stored_from is None else np.array(stored_from, np.int32)
    saved = last if saved_from is None else np.array(saved_from, np.int32)
    exit_arrays = np.array(exits, np.int32), np.array(counts, np.int32)
    return SegmentItems(rows, first, last, stored, saved, *exit_arrays)


def output(num_tokens: int, *segments: SegmentItems | None) -> SchedulerOutput:
    ids = np.arange(num_tokens, dtype=np.int32)
    return SchedulerOutput(segments, ids, computed=(), sampled=(), levels={}, preempted=())


def table(rows: dict[int, list[list[int]]], max_blocks: int = 4) -> np.ndarray:
    """Block tables [3 rows, max_blocks, m] from the frames of each row's blocks."""
    m = len(next(iter(rows.values()))[0])
    out = np.full((3, max_blocks, m), NULL_FRAME, np.int32)
    for row, frames in rows.items():
        out[row, : len(frames)] = frames
    return out


def tables(*segments: np.ndarray, features: dict[int, list[int]] | None = None) -> SimpleNamespace:
    """`features`: blocks of the pool above segment 0, by row."""
    above = [np.full(t.shape[:2], NULL_FRAME, np.int32) for t in segments[:-1]]
    for row, blocks in (features or {}).items():
        above[0][row, : len(blocks)] = blocks
    return SimpleNamespace(segments=segments, features=above)


def test_prefill_and_decode_share_one_flat_batch():
    # Row 2 computes tokens 0..4 of a prompt, row 0 its token 5; blocks of 4 tokens.
    step = prepare(
        output(6, items((2, 0, 5), (0, 5, 6), exits=(0, 1))),
        tables(table({2: [[7], [3]], 0: [[5], [1]]})),
        block_size=4,
    )
    (segment,) = step.segments
    assert segment.positions.tolist() == [0, 1, 2, 3, 4, 5]
    assert segment.source_rows.tolist() == [0, 1, 2, 3, 4, 5]
    assert segment.slot_mapping.tolist() == [[28], [29], [30], [31], [12], [5]]
    assert segment.query_start_loc.tolist() == [0, 5, 6]
    assert segment.seq_lens.tolist() == [5, 6]
    assert segment.block_tables.tolist() == [[[7], [3]], [[5], [1]]]
    assert segment.exit_rows.tolist() == [4, 5]
    assert segment.save_features.tolist() == [-1] * 6
    assert segment.variant_ids.tolist() == [0] * 6
    assert step.input_ids.tolist() == [0, 1, 2, 3, 4, 5]


def test_chunk_that_does_not_reach_the_last_token_has_no_exit_row():
    step = prepare(
        output(3, items((1, 4, 6), (0, 2, 3), exits=(1,))),
        tables(table({1: [[2], [4]], 0: [[3]]})),
        block_size=4,
    )
    assert step.segments[0].positions.tolist() == [4, 5, 2]
    assert step.segments[0].exit_rows.tolist() == [2]


def test_block_of_several_layer_groups_has_a_slot_in_each_of_its_frames():
    step = prepare(
        output(3, items((0, 1, 4), exits=(0,))), tables(table({0: [[4, 9], [6, 2]]})), block_size=2
    )
    (segment,) = step.segments
    # Token 1 is the second of block 0; tokens 2 and 3 fill block 1.
    assert segment.slot_mapping.tolist() == [[9, 19], [12, 4], [13, 5]]
    assert segment.block_tables.tolist() == [[[4, 9], [6, 2]]]


def test_rows_of_a_deeper_segment_are_the_first_rows_of_the_one_below():
    # Deepest tiers first: row 1 reaches segment 1, row 0 ends below it.
    step = prepare(
        output(4, items((1, 0, 3), (0, 7, 8), exits=(1,)), items((1, 0, 3), exits=(0,))),
        tables(table({1: [[1]], 0: [[2], [3]]}), table({1: [[4, 5]]})),
        block_size=4,
    )
    shallow, deep = step.segments
    assert shallow.exit_rows.tolist() == [3]
    assert deep.source_rows.tolist() == [0, 1, 2]
    assert deep.positions.tolist() == [0, 1, 2]
    assert deep.slot_mapping.tolist() == [[16, 20], [17, 21], [18, 22]]
    assert deep.exit_rows.tolist() == [2]


def test_source_rows_follow_the_token_not_the_order_of_items():
    # The deeper segment takes row 0 before row 2, and of row 2 only its last two tokens.
    step = prepare(
        output(5, items((2, 4, 8), (0, 1, 2)), items((0, 1, 2), (2, 6, 8))),
        tables(table({2: [[1], [2]], 0: [[3]]}), table({2: [[4], [5]], 0: [[6]]})),
        block_size=4,
    )
    assert step.segments[1].source_rows.tolist() == [4, 2, 3]


def test_segment_that_nobody_needs_is_none():
    step = prepare(
        output(1, items((0, 0, 1), exits=(0,)), None, None),
        tables(*[table({0: [[1]]})] * 3),
        block_size=4,
    )
    assert step.segments[1] is None and step.segments[2] is None


def test_tables_are_cut_to_the_longest_request_and_padded_with_the_null_frame():
    step = prepare(
        output(2, items((0, 8, 9), (1, 0, 1))),
        tables(table({0: [[1], [2], [3]], 1: [[4]]})),
        block_size=4,
    )
    assert step.segments[0].block_tables[:, :, 0].tolist() == [[1, 2, 3], [4, 0, 0]]


@pytest.mark.parametrize("deep_item", [(1, 0, 2), (0, 0, 2)], ids=["another request", "token 0"])
def test_row_without_a_source_in_this_step_is_noticed(deep_item):
    with pytest.raises(AssertionError, match="no source"):
        prepare(
            output(1, items((0, 1, 2)), items(deep_item)),
            tables(*[table({0: [[1]], 1: [[2]]})] * 2),
            block_size=4,
        )


def test_arrays_have_the_dtype_of_the_interface():
    step = prepare(output(2, items((0, 0, 2), exits=(0,))), tables(table({0: [[1]]})), block_size=4)
    (segment,) = step.segments
    for name, value in vars(segment).items():
        assert value.dtype == np.int32, name


def test_rows_whose_keys_and_values_exist_are_run_without_storing():
    step = prepare(
        output(3, items((0, 2, 5), stored_from=(4,))), tables(table({0: [[1], [2]]})), block_size=4
    )
    assert step.segments[0].slot_mapping[:, 0].tolist() == [-1, -1, 8]


def test_features_are_saved_from_where_the_segment_above_leaves_off():
    step = prepare(
        output(4, items((0, 3, 7), saved_from=(5,)), items((0, 3, 5))),
        tables(table({0: [[1], [2]]}), table({0: [[3], [4]]}), features={0: [0, 6]}),
        block_size=4,
    )
    assert step.segments[0].save_features.tolist() == [-1, -1, 25, 26]


def test_rows_that_the_segment_below_does_not_run_come_from_kept_features():
    # Tokens 3 to 5 were kept, in blocks 2 and 6; token 6 is computed below in this step.
    step = prepare(
        output(2, items((1, 9, 10), (0, 6, 7)), items((0, 3, 7), exits=(0,))),
        tables(
            table({0: [[1], [2]], 1: [[7], [8], [9]]}),
            table({0: [[3], [4]]}),
            features={0: [2, 6]},
        ),
        block_size=4,
    )
    slots = [2 * 4 + 3, 6 * 4 + 0, 6 * 4 + 1]
    assert step.segments[1].source_rows.tolist() == [*(-1 - slot for slot in slots), 1]


def test_segment_above_one_with_nothing_to_do_runs_on_features_alone():
    step = prepare(
        output(0, None, items((0, 0, 2))),
        tables(table({0: [[1]]}), table({0: [[3]]}), features={0: [5]}),
        block_size=4,
    )
    assert step.segments[0] is None
    assert step.segments[1].source_rows.tolist() == [-1 - 20, -1 - 21]


def test_several_last_rows_of_an_item_can_leave_at_an_exit():
    step = prepare(
        output(6, items((0, 0, 1), (1, 4, 8), (2, 2, 3), exits=(0, 1), exit_counts=(1, 3))),
        tables(table({0: [[1]], 1: [[2], [3]], 2: [[4]]})),
        block_size=4,
    )
    assert step.segments[0].exit_rows.tolist() == [0, 2, 3, 4]
