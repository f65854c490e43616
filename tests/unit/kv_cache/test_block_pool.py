"""The pool gives each frame to one block at a time and loses none."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mfs_trt.engine.interface import NULL_FRAME
from mfs_trt.kv_cache.block_pool import Block, BlockPool


def test_every_frame_but_the_null_frame_can_be_held():
    pool = BlockPool(4)
    block = pool.allocate(3)
    assert sorted(block.frames) == [1, 2, 3]
    assert NULL_FRAME not in block.frames
    assert (pool.num_usable_frames, pool.num_free_frames) == (3, 0)


def test_shared_block_comes_free_with_its_last_owner():
    pool = BlockPool(3)
    block = pool.share(pool.allocate(2))
    pool.release(block)
    assert pool.num_free_frames == 0
    pool.release(block)
    assert pool.num_free_frames == 2


def test_frames_freed_last_are_used_first_and_in_their_order():
    pool = BlockPool(10)
    blocks = [pool.allocate(2) for _ in range(3)]
    pool.release(blocks[1])
    assert pool.allocate(2).frames == blocks[1].frames


def test_more_frames_than_are_free_are_never_given():
    pool = BlockPool(3)
    with pytest.raises(AssertionError):
        pool.allocate(3)
    assert pool.num_free_frames == 2


def test_block_without_owner_can_be_neither_released_nor_shared():
    pool = BlockPool(3)
    block = pool.allocate(1)
    pool.release(block)
    with pytest.raises(AssertionError):
        pool.release(block)
    with pytest.raises(AssertionError):
        pool.share(block)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("lost", "frames lost: 5 usable, 3 accounted for"),
        ("twice", "a frame has two owners"),
        ("miscounted", "ref_count=1"),
        ("unowned", "frames lost"),
    ],
)
def test_integrity_check_notices(case, message):
    pool = BlockPool(6)
    block = pool.allocate(2)
    owned = [block]
    if case == "lost":
        owned = []
    elif case == "twice":
        owned = [block, Block(block.frames)]
    elif case == "miscounted":
        owned = [block, block]
    elif case == "unowned":
        owned = [block, Block((9,))]
    with pytest.raises(AssertionError, match=message):
        pool.check_integrity(owned)


class PoolMachine(RuleBasedStateMachine):
    """The pool against the plainest model: a list with one entry for each owner of a block."""

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(12)
        self.owned: list[Block] = []

    @precondition(lambda self: self.pool.num_free_frames > 0)
    @rule(data=st.data())
    def allocate(self, data):
        num_groups = data.draw(st.integers(1, self.pool.num_free_frames))
        block = self.pool.allocate(num_groups)
        assert len(block.frames) == num_groups
        self.owned.append(block)

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def share(self, data):
        block = data.draw(st.sampled_from(self.owned))
        assert self.pool.share(block) is block
        self.owned.append(block)

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def release(self, data):
        index = data.draw(st.integers(0, len(self.owned) - 1))
        self.pool.release(self.owned.pop(index))

    @invariant()
    def free_frames_are_those_that_no_block_holds(self):
        held = {frame for block in self.owned for frame in block.frames}
        assert self.pool.num_free_frames == self.pool.num_usable_frames - len(held)
        self.pool.check_integrity(self.owned)


TestPoolAgainstModel = PoolMachine.TestCase
TestPoolAgainstModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
