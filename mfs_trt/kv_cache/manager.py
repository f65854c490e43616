"""KVCacheManager: the blocks that each running request holds, segment by segment. Ask, then do."""

from mfs_trt.engine.interface import KVCacheSpec
from mfs_trt.kv_cache.block_pool import Block, BlockPool
from mfs_trt.kv_cache.block_tables import BlockTables
from mfs_trt.request import Request


class KVCacheManager:
    """Allocates frames of one arena to requests of every tier."""

    def __init__(self, spec: KVCacheSpec, max_num_seqs: int, max_model_len: int) -> None:
        self.spec = spec
        self.pool = BlockPool(spec.num_frames)
        self.tables = BlockTables(spec, max_num_seqs, max_model_len)
        self._blocks: dict[str, list[list[Block]]] = {}  # request id → per segment, in order

    @property
    def num_used_frames(self) -> int:
        return self.pool.num_usable_frames - self.pool.num_free_frames

    def max_frames(self, request: Request) -> int:
        """Frames that `request` holds when it has grown to its last token.

        The last token is sampled and never computed, so its keys and values need no slot.
        """
        return self.spec.frames_needed(request.tier, request.max_num_tokens - 1)

    def can_ever_fit(self, request: Request) -> bool:
        return self.max_frames(request) <= self.pool.num_usable_frames

    def num_frames_held(self, request: Request) -> int:
        """Frames that come free when `request` gives back what it holds."""
        held = self._blocks.get(request.request_id, [])
        return sum(len(b.frames) for blocks in held for b in blocks if b.ref_count == 1)

    def missing_frames(self, request: Request, last_tokens: list[int]) -> int:
        """Frames that must be free so that segment s can hold tokens up to `last_tokens[s]`."""
        held = self._blocks.get(request.request_id) or [[] for _ in last_tokens]
        block_size = self.spec.block_size
        missing = 0
        for segment, last in enumerate(last_tokens):
            short = last - len(held[segment]) * block_size
            if short > 0:
                missing += -(-short // block_size) * self.spec.groups_per_segment[segment]
        return missing

    def allocate_slots(self, request: Request, last_tokens: list[int]) -> bool:
        """Make room for tokens `[0, last_tokens[s])` in every segment s of `request`.

        False, with nothing changed, when too few frames are free. Gives the request a row when it
        has none.
        """
        missing = self.missing_frames(request, last_tokens)
        if missing > self.pool.num_free_frames:
            return False
        held = self._blocks.get(request.request_id)
        if held is None:
            held = self._blocks[request.request_id] = [[] for _ in last_tokens]
            request.row = self.tables.open_row()
        if missing == 0:
            return True
        for segment, last in enumerate(last_tokens):
            blocks = held[segment]
            num_groups = self.spec.groups_per_segment[segment]
            while len(blocks) * self.spec.block_size < last:
                block = self.pool.allocate(num_groups)
                self.tables.append(request.row, segment, len(blocks), block)
                blocks.append(block)
        return True

    def free(self, request: Request) -> None:
        """Give back everything that `request` holds; nothing to do when it holds nothing."""
        held = self._blocks.pop(request.request_id, None)
        if held is None:
            return
        for blocks in held:
            for block in reversed(blocks):
                self.pool.release(block)
        self.tables.close_row(request.row)
        request.row = -1

    def check_integrity(self) -> None:
        """Raise AssertionError when frames are lost, owned twice or miscounted."""
        owned = [b for held in self._blocks.values() for blocks in held for b in blocks]
        self.pool.check_integrity(owned)
