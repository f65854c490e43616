"""The manager gives requests the blocks they need, or changes nothing."""

import random

import numpy as np
import pytest

from host_logic import make_manager, make_request
from mfs_trt.engine.interface import NULL_FRAME


def blocks_needed(num_tokens: int, block_size: int) -> int:
    return (num_tokens + block_size - 1) // block_size


def snapshot(manager):
    return (
        manager.num_used_frames,
        [table.copy() for table in manager.tables.segments],
        {name: [list(b) for b in held.blocks] for name, held in manager._held.items()},
    )


def assert_same(before, after):
    assert before[0] == after[0]
    assert before[2] == after[2]
    for a, b in zip(before[1], after[1], strict=True):
        np.testing.assert_array_equal(a, b)


def test_deeper_tier_holds_frames_of_all_its_segments():
    manager = make_manager(groups=(1, 1, 2), block_size=4)
    shallow, deep = make_request("shallow", tier=0), make_request("deep", tier=2)
    assert manager.allocate_slots(shallow, [5])
    assert manager.num_used_frames == 2  # two blocks of one frame
    assert manager.allocate_slots(deep, [5, 5, 5])
    assert manager.num_used_frames == 2 + 2 * (1 + 1 + 2)


def test_tables_name_the_frames_of_each_block_in_order():
    manager = make_manager(groups=(1, 2), block_size=2)
    request = make_request(tier=1)
    assert manager.allocate_slots(request, [3, 3])
    assert manager.allocate_slots(request, [5, 5])
    shallow, deep = (table[request.row] for table in manager.tables.segments)
    held = manager._held[request.request_id].blocks
    assert shallow[:3].tolist() == [list(b.frames) for b in held[0]]
    assert deep[:3].tolist() == [list(b.frames) for b in held[1]]
    assert (shallow[3:] == NULL_FRAME).all() and (deep[3:] == NULL_FRAME).all()
    assert len({f for part in (shallow[:3], deep[:3]) for f in part.ravel().tolist()}) == 9


def test_growing_within_a_block_takes_no_frame():
    manager = make_manager(groups=(1,), block_size=4)
    request = make_request()
    assert manager.allocate_slots(request, [1])
    assert manager.allocate_slots(request, [4])
    assert manager.num_used_frames == 1
    assert manager.allocate_slots(request, [5])
    assert manager.num_used_frames == 2


@pytest.mark.parametrize("holds_something", [False, True])
def test_refused_allocation_changes_nothing(holds_something):
    manager = make_manager(num_frames=1 + 7, groups=(1, 1, 2), block_size=4)
    request = make_request(tier=2)
    if holds_something:
        assert manager.allocate_slots(request, [4, 4, 4])
    row, before = request.row, snapshot(manager)
    assert not manager.allocate_slots(request, [8, 8, 8])
    assert_same(before, snapshot(manager))
    assert request.row == row


def test_freeing_gives_back_frames_and_row_and_clears_the_tables():
    manager = make_manager(groups=(1, 2), max_num_seqs=1)
    request = make_request(tier=1)
    assert manager.allocate_slots(request, [9, 9])
    manager.close(request)
    assert manager.num_used_frames == 0
    assert request.row == -1
    assert all((table == NULL_FRAME).all() for table in manager.tables.segments)
    assert manager.allocate_slots(make_request("next"), [1])  # the only row is free again


def test_freeing_what_holds_nothing_changes_nothing():
    manager = make_manager()
    manager.close(make_request())
    assert manager.num_used_frames == 0
    assert len(manager.tables._free_rows) == 8


def test_largest_request_needs_no_slot_for_its_last_token():
    # 4 prompt tokens and 5 to generate: the last one is sampled and never computed.
    request = make_request(num_prompt_tokens=4, max_tokens=5)
    fits, misses = (make_manager(num_frames=n, groups=(1,), block_size=4) for n in (3, 2))
    assert fits.max_frames(request) == 2
    assert fits.can_ever_fit(request)
    assert not misses.can_ever_fit(request)


def test_frames_held_counts_only_what_comes_free():
    manager = make_manager(groups=(1, 2), block_size=4)
    request = make_request(tier=1)
    assert manager.num_frames_held(request) == 0
    assert manager.allocate_slots(request, [5, 5])
    assert manager.num_frames_held(request) == 2 * 3
    shared = manager._held[request.request_id].blocks[1][0]
    manager.pool.share(shared)
    assert manager.num_frames_held(request) == 2 * 3 - 2
    manager.pool.release(shared)


def test_integrity_check_notices_a_lost_block():
    manager = make_manager()
    request = make_request()
    assert manager.allocate_slots(request, [4])
    manager._held[request.request_id].blocks[0].pop()
    with pytest.raises(AssertionError, match="frames lost"):
        manager.check_integrity()


@pytest.mark.parametrize("seed", range(20))
def test_random_load_agrees_with_counting(seed):
    """Allocate, grow and free at random: the model knows tokens per request and nothing else."""
    rng = random.Random(seed)
    groups = rng.choice([(1,), (1, 1), (1, 2), (2, 1, 3)])
    block_size = rng.choice([1, 2, 3, 8])
    manager = make_manager(
        num_frames=rng.randint(8, 40), groups=groups, block_size=block_size, max_num_seqs=4
    )
    requests = [make_request(f"r{i}", tier=rng.randrange(len(groups))) for i in range(4)]
    tokens: dict[str, list[int]] = {}

    def frames(counts):
        return sum(m * blocks_needed(n, block_size) for m, n in zip(groups, counts, strict=False))

    for _ in range(150):
        request = rng.choice(requests)
        held = tokens.get(request.request_id)
        if rng.random() < 0.25:
            manager.close(request)
            tokens.pop(request.request_id, None)
        else:
            wanted = [rng.randint(0, 20) for _ in range(request.tier + 1)]
            grown = [max(a, b) for a, b in zip(wanted, held or [0] * len(wanted), strict=True)]
            new = frames(grown) - (frames(held) if held else 0)
            assert manager.missing_frames(request, wanted) == new
            before = snapshot(manager)
            if manager.allocate_slots(request, wanted):
                tokens[request.request_id] = grown
            else:
                assert new > manager.pool.num_free_frames
                assert_same(before, snapshot(manager))
        assert manager.num_used_frames == sum(frames(counts) for counts in tokens.values())
        manager.check_integrity()
    rows = [r.row for r in requests if r.request_id in tokens]
    assert len(set(rows)) == len(rows) and -1 not in rows
