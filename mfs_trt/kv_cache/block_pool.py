"""BlockPool: who owns each frame of the KV arena.

A block holds `block_size` tokens of one segment and occupies as many frames as the segment has
layer groups; any free frame serves any segment. Blocks are reference counted, so that requests can
share them.
"""

from dataclasses import dataclass

from mfs_trt.engine.interface import NULL_FRAME


@dataclass(eq=False, slots=True)
class Block:
    """Frames that hold one block, one per layer group of its segment."""

    frames: tuple[int, ...]
    ref_count: int = 1


class BlockPool:
    """The free list and the reference counts. Frames freed last are used first: they are warm."""

    def __init__(self, num_frames: int) -> None:
        self.num_frames = num_frames
        self._free = list(range(num_frames - 1, NULL_FRAME, -1))

    @property
    def num_usable_frames(self) -> int:
        """Frames that requests can hold: all but the null frame."""
        return self.num_frames - 1

    @property
    def num_free_frames(self) -> int:
        return len(self._free)

    def allocate(self, num_groups: int) -> Block:
        """A new block of `num_groups` frames; the caller has checked `num_free_frames`."""
        assert num_groups <= len(self._free), (num_groups, len(self._free))
        return Block(tuple(self._free.pop() for _ in range(num_groups)))

    def share(self, block: Block) -> Block:
        """One more owner of `block`."""
        assert block.ref_count > 0, block
        block.ref_count += 1
        return block

    def release(self, block: Block) -> None:
        """One owner less; the last one returns the frames."""
        assert block.ref_count > 0, block
        block.ref_count -= 1
        if block.ref_count == 0:
            self._free.extend(reversed(block.frames))

    def check_integrity(self, owned: list[Block]) -> None:
        """Raise AssertionError unless free frames and those of `owned` make up the pool.

        `owned` names a block once for each of its owners.
        """
        counts: dict[int, int] = {}
        for block in owned:
            counts[id(block)] = counts.get(id(block), 0) + 1
        unique = {id(block): block for block in owned}
        for key, block in unique.items():
            assert block.ref_count == counts[key], (block, counts[key])
        frames = [f for block in unique.values() for f in block.frames] + self._free
        assert len(frames) == len(set(frames)), "a frame has two owners"
        assert set(frames) == set(range(1, self.num_frames)), (
            f"frames lost: {self.num_usable_frames} usable, {len(frames)} accounted for"
        )
