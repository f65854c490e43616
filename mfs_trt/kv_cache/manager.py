"""KVCacheManager: the blocks that each request holds, segment by segment. Ask, then do.

Full blocks can be found again by any request with the same tokens, also while their request runs;
per segment, so that a prompt computed at a deep tier serves a shallow one whole, and one computed
at a shallow tier serves the lower segments of a deep one.
"""

from mfs_trt.engine.interface import KVCacheSpec
from mfs_trt.kv_cache.block_pool import BlockPool
from mfs_trt.kv_cache.block_tables import BlockTables
from mfs_trt.kv_cache.feature_store import FeatureStore
from mfs_trt.kv_cache.holding import Holding
from mfs_trt.kv_cache.prefix_keys import BASE_GROUP, BlockKey, TokenChain
from mfs_trt.request import Request


class KVCacheManager:
    """Allocates frames of one arena to requests of every tier."""

    def __init__(
        self, spec: KVCacheSpec, max_num_seqs: int, max_model_len: int, revision: str = ""
    ) -> None:
        """`revision`: of the family, part of every key."""
        self.spec = spec
        self.revision = revision
        self.pool = BlockPool(spec.num_frames)
        self.tables = BlockTables(spec, max_num_seqs, max_model_len)
        self.features = FeatureStore(spec, self.tables)
        self.num_reused_tokens = [0] * len(spec.groups_per_segment)  # per segment, all requests
        self._held: dict[str, Holding] = {}
        self._chains: dict[str, TokenChain] = {}  # of waiting requests as well: hashed once

    @property
    def num_used_frames(self) -> int:
        return self.pool.num_usable_frames - self.pool.num_free_frames

    def max_frames(self, request: Request) -> int:
        """Frames that `request` holds when it has grown to its last token, at its highest tier.

        The last token is sampled and never computed, so its keys and values need no slot.
        """
        return self.spec.frames_needed(request.highest_tier, request.max_num_tokens - 1)

    def can_ever_fit(self, request: Request) -> bool:
        return self.max_frames(request) <= self.pool.num_usable_frames

    def num_frames_held(self, request: Request) -> int:
        """Frames that come free when `request` gives back what it holds."""
        held = self._held.get(request.request_id)
        if held is None:
            return 0
        return sum(len(b.frames) for blocks in held.blocks for b in blocks if b.ref_count == 1)

    def num_blocks_held(self, request: Request) -> int:
        held = self._held.get(request.request_id)
        return 0 if held is None else sum(map(len, held.blocks))

    # -- opening and closing ---------------------------------------------------------------------

    def open(self, request: Request) -> None:
        """Start to hold: whatever the cache has of the request's tokens; moves its counts there."""
        if request.request_id in self._held:
            return
        num_segments = len(self.spec.groups_per_segment)
        self._held[request.request_id] = Holding(num_segments)
        self.extend(request, 0)

    def extend(self, request: Request, first_segment: int) -> None:
        """Take what the cache has for the segments from `first_segment` to the request's tier."""
        held = self._held[request.request_id]
        counts = request.num_computed_tokens
        if not request.prompt_request.reuse_prefix:
            return
        chain = self._chain(request)
        chain.extend(request.token_ids, request.num_final_tokens)
        # The last token is computed in any case: its logits are wanted.
        reach = (request.num_tokens - 1) // self.spec.block_size
        if first_segment > 0:
            reach = min(reach, counts[first_segment - 1] // self.spec.block_size)
        for segment in range(first_segment, request.tier + 1):
            blocks = held.blocks[segment]
            assert not blocks, (request.request_id, segment)
            for digest in chain.digests[:reach]:
                block = self.pool.find(BlockKey(segment, BASE_GROUP, digest))
                if block is None:
                    break
                blocks.append(self.pool.share(block))
            reach = held.num_registered[segment] = len(blocks)
            counts[segment] = reach * self.spec.block_size
            held.num_cached_tokens[segment] = counts[segment]
            if request.row >= 0:
                self._count_reuse(request, segment, held)
                for index, block in enumerate(blocks):
                    self.tables.append(request.row, segment, index, block)
        for boundary in range(max(0, first_segment - 1), request.tier):
            gap = counts[boundary + 1], counts[boundary]
            self.features.find(request, boundary, gap, chain)

    def close(self, request: Request) -> None:
        """Give back everything that `request` holds; nothing to do when it holds nothing.

        The deepest segments' and last blocks go first, and so are evicted first.
        """
        held = self._held.pop(request.request_id, None)
        if held is None:
            return
        self.features.close(request)
        for blocks in reversed(held.blocks):
            for block in reversed(blocks):
                self.pool.release(block)
        if request.row >= 0:
            self.tables.close_row(request.row)
            request.row = -1

    def forget(self, request: Request) -> None:
        """`close`, for a request that does not come back."""
        self.close(request)
        self._chains.pop(request.request_id, None)

    def cut(self, request: Request, first_segment: int) -> None:
        """Give back the blocks of `first_segment` and deeper ones."""
        held = self._held.get(request.request_id)
        if held is None:
            return
        for segment in range(len(held.blocks) - 1, first_segment - 1, -1):
            for block in reversed(held.blocks[segment]):
                self.pool.release(block)
            held.blocks[segment] = []
            held.num_registered[segment] = held.num_cached_tokens[segment] = 0
        if request.row >= 0:
            self.tables.cut(request.row, first_segment)

    # -- growing ---------------------------------------------------------------------------------

    def missing_frames(self, request: Request, last_tokens: list[int]) -> int:
        """Frames that must be free so that segment s can hold tokens up to `last_tokens[s]`."""
        held = self._held.get(request.request_id)
        block_size = self.spec.block_size
        missing = 0
        for segment, last in enumerate(last_tokens):
            num_held = 0 if held is None else len(held.blocks[segment])
            short = last - num_held * block_size
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
        self.open(request)
        held = self._held[request.request_id]
        if request.row < 0:
            self._open_row(request, held)
        if missing == 0:
            return True
        for segment, last in enumerate(last_tokens):
            blocks = held.blocks[segment]
            num_groups = self.spec.groups_per_segment[segment]
            while len(blocks) * self.spec.block_size < last:
                block = self.pool.allocate(num_groups)
                self.tables.append(request.row, segment, len(blocks), block)
                blocks.append(block)
        return True

    def _open_row(self, request: Request, held: Holding) -> None:
        request.row = self.tables.open_row()
        for segment, blocks in enumerate(held.blocks):
            for index, block in enumerate(blocks):
                self.tables.append(request.row, segment, index, block)
            self._count_reuse(request, segment, held)
        self.features.show(request)

    def _count_reuse(self, request: Request, segment: int, held: Holding) -> None:
        num_tokens = held.num_cached_tokens[segment]
        self.num_reused_tokens[segment] += num_tokens
        request.num_reused_blocks += num_tokens // self.spec.block_size

    def commit(self, request: Request) -> None:
        """The request's counts have moved: offer its new full blocks to others."""
        held = self._held[request.request_id]
        if not request.prompt_request.reuse_prefix:
            return
        size, num_final = self.spec.block_size, request.num_final_tokens
        for segment, count in enumerate(request.num_computed_tokens):
            full = (count if count < num_final else num_final) // size
            if full > held.num_registered[segment]:
                chain = self._chain(request)
                chain.extend(request.token_ids, num_final)
                for i in range(held.num_registered[segment], full):
                    block = held.blocks[segment][i]
                    if block.key is None:
                        key = BlockKey(segment, BASE_GROUP, chain.digests[i])
                        self.pool.register(block, key)
                held.num_registered[segment] = full
        self.features.commit(request, self._chains.get(request.request_id))

    def _chain(self, request: Request) -> TokenChain:
        chain = self._chains.get(request.request_id)
        if chain is None:
            salt = request.prompt_request.cache_salt
            chain = TokenChain(self.revision, salt, self.spec.block_size)
            self._chains[request.request_id] = chain
        return chain

    def check_integrity(self) -> None:
        """Raise AssertionError when frames are lost, owned twice or miscounted."""
        held = self._held.values()
        self.pool.check_integrity([b for h in held for blocks in h.blocks for b in blocks])
        self.features.check_integrity()
