"""BlockPool: who owns each frame of an arena, and which content outlives its owner.

A block holds `block_size` tokens of one segment and occupies as many frames as the segment has
layer groups; any free frame serves any segment. Blocks are reference counted, so that requests can
share them. A block that was registered under a key keeps its content when the last owner lets go,
until its frames are needed: then the one unused for longest is evicted first.
"""

from collections.abc import Hashable
from dataclasses import dataclass

from mfs_trt.engine.interface import NULL_FRAME


@dataclass(eq=False, slots=True)
class Block:
    """Frames that hold one block, one per layer group of its segment."""

    frames: tuple[int, ...]
    ref_count: int = 1
    key: Hashable = None  # what it holds, once it is full and may be found again


class BlockPool:
    """Free list, reference counts, content index. What was freed last is used first: it is warm."""

    def __init__(self, num_frames: int) -> None:
        self.num_frames = num_frames
        self.num_evictions = 0
        self._free = list(range(num_frames - 1, NULL_FRAME, -1))
        self._by_key: dict[Hashable, Block] = {}
        self._unused: dict[Block, None] = {}  # registered, without owner; first: unused for longest
        self._num_unused_frames = 0

    @property
    def num_usable_frames(self) -> int:
        """Frames that requests can hold: all but the null frame."""
        return self.num_frames - 1

    @property
    def num_free_frames(self) -> int:
        """Frames that an allocation can have, those of evictable content included."""
        return len(self._free) + self._num_unused_frames

    @property
    def num_cached_frames(self) -> int:
        """Frames whose content waits for a request that shares it."""
        return self._num_unused_frames

    def allocate(self, num_groups: int) -> Block:
        """A new block of `num_groups` frames; the caller has checked `num_free_frames`."""
        assert num_groups <= self.num_free_frames, (num_groups, self.num_free_frames)
        while len(self._free) < num_groups:
            self._evict(next(iter(self._unused)))
        return Block(tuple(self._free.pop() for _ in range(num_groups)))

    def find(self, key: Hashable) -> Block | None:
        """The block registered under `key`; it may have no owner, until `share` gives it one."""
        return self._by_key.get(key)

    def register(self, block: Block, key: Hashable) -> None:
        """`block` is full and holds what `key` says. The first block of a key stays its block."""
        assert block.ref_count > 0 and block.key is None, block
        if key not in self._by_key:
            self._by_key[key] = block
            block.key = key

    def share(self, block: Block) -> Block:
        """One more owner of a block that has one, or of registered content."""
        if block.ref_count == 0:
            assert block in self._unused, block
            del self._unused[block]
            self._num_unused_frames -= len(block.frames)
        block.ref_count += 1
        return block

    def release(self, block: Block) -> None:
        """One owner less; after the last, the frames are free, or hold content until evicted."""
        assert block.ref_count > 0, block
        block.ref_count -= 1
        if block.ref_count > 0:
            return
        if block.key is None:
            self._free.extend(reversed(block.frames))
        else:
            self._unused[block] = None
            self._num_unused_frames += len(block.frames)

    def _evict(self, block: Block) -> None:
        del self._unused[block], self._by_key[block.key]
        self._num_unused_frames -= len(block.frames)
        self._free.extend(reversed(block.frames))
        self.num_evictions += 1

    def check_integrity(self, owned: list[Block]) -> None:
        """Raise AssertionError unless free, cached and owned frames make up the pool.

        `owned` names a block once for each of its owners.
        """
        counts: dict[int, int] = {}
        for block in owned:
            counts[id(block)] = counts.get(id(block), 0) + 1
        unique = {id(block): block for block in [*owned, *self._unused]}
        for key, block in unique.items():
            assert block.ref_count == counts.get(key, 0), (block, counts.get(key, 0))
        for content, block in self._by_key.items():
            assert block.key == content and id(block) in unique, block
        frames = [f for block in unique.values() for f in block.frames] + self._free
        assert len(frames) == len(set(frames)), "a frame has two owners"
        assert set(frames) == set(range(1, self.num_frames)), (
            f"frames lost: {self.num_usable_frames} usable, {len(frames)} accounted for"
        )
        assert self._num_unused_frames == sum(len(b.frames) for b in self._unused)
