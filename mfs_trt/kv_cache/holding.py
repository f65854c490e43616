"""Holding: the KV blocks of one request."""

from mfs_trt.kv_cache.block_pool import Block


class Holding:
    """Per segment: blocks in the order of the tokens, and how far the cache knows them."""

    def __init__(self, num_segments: int) -> None:
        self.blocks: list[list[Block]] = [[] for _ in range(num_segments)]
        self.num_registered = [0] * num_segments  # blocks that were offered to the cache
        self.num_cached_tokens = [0] * num_segments  # tokens that came from it
