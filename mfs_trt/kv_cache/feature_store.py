"""FeatureStore: hidden states kept at the boundaries, for segments that catch up later.

A request keeps those of tokens `[first, last)` at a boundary: of tokens that the segment below has
computed and the one above has not. Full blocks stay behind as cache content under the same keys as
the blocks of keys and values. A feature that is gone costs a row run again, never a wrong answer.
"""

from dataclasses import dataclass, field

from mfs_trt.engine.interface import KVCacheSpec
from mfs_trt.kv_cache.block_pool import Block, BlockPool
from mfs_trt.kv_cache.block_tables import BlockTables
from mfs_trt.kv_cache.prefix_keys import BASE_GROUP, BlockKey, TokenChain
from mfs_trt.request import Request


@dataclass
class _Kept:
    """One request's features at one boundary, of tokens `[first, last)`."""

    first: int = 0
    last: int = 0
    blocks: dict[int, Block] = field(default_factory=dict)  # by number of the block of tokens
    lowest: int = 0  # no block before this one is held
    offered: int = 0  # blocks before this one are known to the cache, or not full


_EMPTY = _Kept()


class FeatureStore:
    """One pool of blocks a boundary; `tables.features` shows which request has which."""

    def __init__(self, spec: KVCacheSpec, tables: BlockTables) -> None:
        num_blocks = max(1, spec.num_feature_slots // spec.block_size)
        self.pools = [BlockPool(num_blocks) for _ in spec.groups_per_segment[:-1]]
        self.has_room = any(pool.num_usable_frames for pool in self.pools)  # features are kept
        self._block_size = spec.block_size
        self._tables = tables
        self._kept: dict[tuple[str, int], _Kept] = {}  # by request id and boundary

    def end(self, request: Request, boundary: int, first: int) -> int:
        """Features of tokens `[first, end)` are kept; `first` where there are none."""
        kept = self._kept.get((request.request_id, boundary))
        if kept is None or not kept.first <= first < kept.last:
            return first
        return kept.last

    def reserve(self, request: Request, boundary: int, first: int, last: int, above: int) -> bool:
        """Room for the features of tokens `[first, last)`, which this step makes; ask, then do.

        They go on where the kept ones end, or start anew: where none are kept, or where the segment
        above has come to, `above`, and needs none of them. False, with nothing changed, when the
        pool is full or tokens between are missing.
        Nothing is let go of here: this step may read it.
        """
        pool, size = self.pools[boundary], self._block_size
        kept = self._kept.get((request.request_id, boundary), _EMPTY)
        if kept.first < first == kept.last == last - 1 and first % size:
            block = kept.blocks[first // size]
            if block.key is None and block.ref_count == 1:
                kept.last = last
                return True  # the next token, in a block that is there: nearly always
        goes_on = kept.first <= first <= kept.last
        if not goes_on and kept.first < kept.last and above < first:
            return False
        missing = [i for i in range(first // size, -(-last // size)) if i not in kept.blocks]
        if len(missing) > pool.num_free_frames or self._is_shared(kept, first):
            return False
        if kept is _EMPTY:
            kept = self._kept[request.request_id, boundary] = _Kept()
        for i in missing:
            kept.blocks[i] = pool.allocate(1)
        if not goes_on or kept.first == kept.last:
            kept.first = first
            kept.offered = -(-first // size)
            if len(kept.blocks) == len(missing):
                kept.lowest = first // size
        kept.last = last
        if missing:
            self._show(request, boundary, kept)
        return True

    def rewind(self, request: Request) -> None:
        """Tokens behind the request's counts are computed anew, and their features with them."""
        for boundary, count in enumerate(request.num_computed_tokens[: len(self.pools)]):
            kept = self._kept.get((request.request_id, boundary))
            if kept is not None and kept.last > count:
                kept.last = max(count, kept.first)

    def find(
        self, request: Request, boundary: int, gap: tuple[int, int], chain: TokenChain
    ) -> None:
        """Take from the cache what it has, in one piece, of the features of tokens `gap`.

        Both ends are borders of blocks.
        """
        if self.end(request, boundary, gap[0]) >= gap[1]:
            return
        size = self._block_size
        kept = _Kept(gap[0], gap[0], lowest=gap[0] // size)
        for i in range(gap[0] // size, gap[1] // size):
            key = BlockKey(boundary, BASE_GROUP, chain.digests[i])
            block = self.pools[boundary].find(key)
            if block is None:
                break
            kept.blocks[i] = self.pools[boundary].share(block)
            kept.last = (i + 1) * size
        kept.offered = kept.last // size
        if kept.blocks:
            old = self._kept.pop((request.request_id, boundary), None)
            if old is not None:
                self._drop(old, boundary)
            self._kept[request.request_id, boundary] = kept
            self._show(request, boundary, kept)

    def commit(self, request: Request, chain: TokenChain | None) -> None:
        """Offer full blocks to the cache, let go of those that the segment above has used."""
        size = self._block_size
        counts = request.num_computed_tokens
        for boundary in range(min(len(self.pools), len(counts))):
            kept = self._kept.get((request.request_id, boundary))
            if kept is None or not kept.blocks:
                continue
            full = min(kept.last, request.num_final_tokens) // size
            if chain is not None and kept.offered < full:
                chain.extend(request.token_ids, request.num_final_tokens)
                for i in range(kept.offered, full):
                    block = kept.blocks[i]
                    if block.key is None:
                        key = BlockKey(boundary, BASE_GROUP, chain.digests[i])
                        self.pools[boundary].register(block, key)
                kept.offered = full
            used = counts[boundary + 1] // size if boundary + 1 < len(counts) else 0
            if used > kept.lowest:
                self._release_before(kept, boundary, used)
                self._show(request, boundary, kept)

    def _release_before(self, kept: _Kept, boundary: int, used: int) -> None:
        """Let go of the blocks before number `used`."""
        for i in range(kept.lowest, used):
            block = kept.blocks.pop(i, None)
            if block is not None:
                self.pools[boundary].release(block)
        kept.lowest = used
        kept.first = max(kept.first, used * self._block_size)
        kept.last = max(kept.last, kept.first)
        kept.offered = max(kept.offered, used)

    def show(self, request: Request) -> None:
        """Write the request's blocks into the tables: it has a row now."""
        for boundary in range(len(self.pools)):
            kept = self._kept.get((request.request_id, boundary))
            if kept is not None:
                self._show(request, boundary, kept)

    def close(self, request: Request) -> None:
        """Let go of everything that `request` keeps."""
        for boundary in range(len(self.pools)):
            kept = self._kept.pop((request.request_id, boundary), None)
            if kept is not None:
                self._drop(kept, boundary)

    def _is_shared(self, kept: _Kept, first: int) -> bool:
        block = kept.blocks.get(first // self._block_size)
        return block is not None and (block.key is not None or block.ref_count > 1)

    def _drop(self, kept: _Kept, boundary: int) -> None:
        for _, block in sorted(kept.blocks.items(), reverse=True):
            self.pools[boundary].release(block)
        kept.blocks.clear()

    def _show(self, request: Request, boundary: int, kept: _Kept) -> None:
        if request.row >= 0:
            self._tables.set_features(request.row, boundary, kept.blocks)

    def check_integrity(self) -> None:
        """Raise AssertionError when blocks are lost, owned twice or miscounted."""
        for boundary, pool in enumerate(self.pools):
            owned = [
                block
                for (_, at), kept in self._kept.items()
                if at == boundary
                for block in kept.blocks.values()
            ]
            pool.check_integrity(owned)
