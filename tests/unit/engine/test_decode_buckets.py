"""Which rows are decode-shaped, the bucket they are padded to, and what padding is."""

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mfs_trt.engine.decode_buckets import DecodeBucket, DecodeBuckets, pad_rows, padded_sizes
from mfs_trt.engine.interface import EngineLimits, SegmentInput
from mfs_trt.engine.tensorrt_inputs import attention_inputs, num_scratch_frames

BLOCK_SIZE = 4
LIMITS = EngineLimits(max_num_seqs=20, max_num_batched_tokens=64, max_model_len=100)
BUCKETS = DecodeBuckets(LIMITS, BLOCK_SIZE)


def segment_rows(lengths, counts=None, m=1, exists=()):
    """Requests of `lengths` tokens after the step, of which `counts` are computed in it."""
    counts = counts or [1] * len(lengths)
    positions = np.concatenate([np.arange(n - c, n) for n, c in zip(lengths, counts, strict=True)])
    request = np.repeat(np.arange(len(lengths)), counts)
    max_blocks = -(-LIMITS.max_model_len // BLOCK_SIZE)
    blocks = [-(-n // BLOCK_SIZE) for n in lengths]
    tables = np.zeros((len(lengths), max_blocks, m), np.int32)
    frame = 1
    for r, count in enumerate(blocks):
        frames = frame + np.arange(count * m).reshape(count, m)
        tables[r, :count] = frames
        frame += count * m
    slots = tables[request, positions // BLOCK_SIZE] * BLOCK_SIZE
    slots += (positions % BLOCK_SIZE)[:, None].astype(np.int32)
    slots[list(exists)] = -1
    num_rows = len(positions)
    return SegmentInput(
        source_rows=np.arange(num_rows, dtype=np.int32)[::-1].copy(),
        positions=positions.astype(np.int32),
        slot_mapping=slots.astype(np.int32),
        query_start_loc=np.cumsum([0, *counts], dtype=np.int32),
        seq_lens=np.array(lengths, np.int32),
        block_tables=tables,
        variant_ids=np.zeros(num_rows, np.int32),
        save_features=np.arange(num_rows, dtype=np.int32),
        exit_rows=np.array([0], np.int32),
    )


LENGTHS = st.lists(st.integers(1, LIMITS.max_model_len), min_size=1, max_size=20)


# -- sizes ---------------------------------------------------------------------------------------


def test_sizes_end_at_the_greatest():
    assert padded_sizes(1) == (1,)
    assert padded_sizes(5) == (1, 2, 3, 4, 5)
    assert padded_sizes(64) == (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
    assert padded_sizes(20) == (1, 2, 3, 4, 6, 8, 12, 16, 20)


@given(greatest=st.integers(1, 3000), data=st.data())
def test_padding_adds_less_than_half(greatest, data):
    size = data.draw(st.integers(1, greatest))
    padded = min(s for s in padded_sizes(greatest) if s >= size)
    assert size <= padded <= greatest and 2 * (padded - size) < size


# -- the choice ----------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(lengths=LENGTHS)
def test_one_row_of_each_request_fits_its_bucket(lengths):
    rows = segment_rows(lengths)
    bucket = BUCKETS.choose(rows)
    assert len(lengths) <= bucket.num_rows <= LIMITS.max_num_seqs
    assert max(lengths) <= bucket.num_blocks * BLOCK_SIZE < LIMITS.max_model_len + BLOCK_SIZE


@settings(max_examples=40, deadline=None)
@given(lengths=LENGTHS, data=st.data())
def test_two_rows_of_a_request_are_not_decode_shaped(lengths, data):
    long = [n for n in lengths if n > 1] or [2]
    counts = [1] * len(long)
    counts[data.draw(st.integers(0, len(long) - 1))] = 2
    assert BUCKETS.choose(segment_rows(long, counts)) is None


def test_a_request_without_rows_is_not_decode_shaped():
    rows = segment_rows([3, 5, 4], [1, 0, 1])
    assert rows.num_rows == 2 and BUCKETS.choose(rows) is None
    two_and_none = segment_rows([3, 5, 4], [2, 0, 1])
    assert two_and_none.num_rows == two_and_none.num_reqs and BUCKETS.choose(two_and_none) is None


def test_more_rows_than_the_limits_have_no_bucket():
    assert BUCKETS.choose(segment_rows([3] * 21)) is None
    narrow = DecodeBuckets(EngineLimits(20, 2, 100), BLOCK_SIZE)
    assert narrow.choose(segment_rows([3, 3])) == DecodeBucket(2, 1)
    assert narrow.choose(segment_rows([3, 3, 3])) is None
    assert narrow.max_rows == 2


# -- padding -------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(lengths=LENGTHS, m=st.integers(1, 2), data=st.data())
def test_real_rows_stay_and_the_rest_stores_nothing(lengths, m, data):
    rows = segment_rows(lengths, m=m)
    num_columns = data.draw(st.integers(-(-max(lengths) // BLOCK_SIZE), 25))
    rows = replace(rows, block_tables=rows.block_tables[:, :num_columns])
    bucket = BUCKETS.choose(rows)
    larger = [n for n in BUCKETS.block_sizes if n >= bucket.num_blocks]
    bucket = replace(bucket, num_blocks=data.draw(st.sampled_from(larger)))
    padded, n = pad_rows(rows, bucket), len(lengths)
    assert padded.num_rows == padded.num_reqs == bucket.num_rows
    assert padded.block_tables.shape == (bucket.num_rows, bucket.num_blocks, m)
    for name in ("source_rows", "positions", "slot_mapping", "seq_lens", "save_features"):
        mine, theirs = getattr(padded, name), getattr(rows, name)
        np.testing.assert_array_equal(mine[:n], theirs)
        assert mine.dtype == theirs.dtype
    width = min(bucket.num_blocks, rows.block_tables.shape[1])
    np.testing.assert_array_equal(padded.block_tables[:n, :width], rows.block_tables[:, :width])
    np.testing.assert_array_equal(padded.query_start_loc, np.arange(bucket.num_rows + 1))
    np.testing.assert_array_equal(padded.exit_rows, rows.exit_rows)
    assert (padded.slot_mapping[n:] == -1).all() and (padded.save_features[n:] == -1).all()
    assert (padded.seq_lens[n:] == 1).all() and not padded.positions[n:].any()
    assert not padded.block_tables[n:].any() and not padded.source_rows[n:].any()


@settings(max_examples=40, deadline=None)
@given(lengths=LENGTHS, data=st.data())
def test_native_layers_write_padding_to_scratch_only_and_read_the_null_frame_for_it(lengths, data):
    """What the portable plans are given: real rows' slots are those of the rows without padding."""
    exists = data.draw(st.sets(st.integers(0, len(lengths) - 1)))
    rows = segment_rows(lengths, exists=exists)
    bucket = BUCKETS.choose(rows)
    num_scratch = num_scratch_frames(LIMITS, BLOCK_SIZE)
    num_frames = 1 + sum(-(-n // BLOCK_SIZE) for n in lengths) + num_scratch
    sizes = (num_frames, num_scratch, BLOCK_SIZE)
    arrays = attention_inputs(pad_rows(rows, bucket), *sizes, num_blocks=bucket.num_blocks)
    alone = attention_inputs(rows, *sizes)
    first_scratch = num_frames - num_scratch
    written = written_slots(arrays)
    assert {r: s for r, s in written.items() if s < first_scratch * BLOCK_SIZE} == {
        r: s for r, s in written_slots(alone).items() if s < first_scratch * BLOCK_SIZE
    }
    assert all(written[r] >= first_scratch * BLOCK_SIZE for r in written if r >= len(lengths))
    assert arrays["block_tables.0"].shape == (bucket.num_rows, bucket.num_blocks)
    assert len(arrays["key_positions"]) == bucket.num_blocks * BLOCK_SIZE
    assert not arrays["block_tables.0"][len(lengths) :].any()
    np.testing.assert_array_equal(arrays["row_queries"], np.arange(bucket.num_rows))


def written_slots(arrays) -> dict[int, int]:
    """Row → slot that the packed update of the cache writes it to."""
    starts, offsets = arrays["frame_row_starts.0"], arrays["frame_offsets.0"]
    slots = {}
    for frame in np.flatnonzero(np.diff(starts)):
        for i, row in enumerate(arrays["rows_by_frame.0"][starts[frame] : starts[frame + 1]]):
            slots[int(row)] = int(frame * BLOCK_SIZE + offsets[frame] + i)
    return slots


def test_rows_that_fill_their_bucket_get_no_padding():
    rows = segment_rows([1, 7, 8])
    padded = pad_rows(rows, DecodeBucket(3, 2))
    np.testing.assert_array_equal(padded.block_tables, rows.block_tables[:, :2])
    np.testing.assert_array_equal(padded.slot_mapping, rows.slot_mapping)
