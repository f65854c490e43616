"""Keys of cached content: what a full block holds, said so that equal keys mean equal content.

A chain of digests stands for the tokens: link i covers blocks 0 to i. Its root takes in whatever
else the content depends on for the whole request; segment and KV group stand beside it in the key.
"""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

BASE_GROUP = 0  # the KV group of the base


class BlockKey(NamedTuple):
    """Under which a pool finds a block again."""

    segment: int  # of the keys and values; of a feature: the one below its boundary
    kv_group: int  # variants with equal keys and values in this segment share a group
    digest: bytes  # of family revision, salt and all tokens up to the block's last


class TokenChain:
    """The digests of one request's full blocks, made as its tokens become final."""

    def __init__(self, revision: str, salt: str, block_size: int) -> None:
        # Lengths before the texts: no other pair of texts reads the same.
        texts = [text.encode("utf-8") for text in (revision, salt)]
        head = b"".join(len(text).to_bytes(8, "little") + text for text in texts)
        self._last = hashlib.sha256(head + block_size.to_bytes(8, "little")).digest()
        self._block_size = block_size
        self.digests: list[bytes] = []

    def extend(self, token_ids: Sequence[int], num_final: int) -> None:
        """Cover all full blocks of `token_ids[:num_final]`, of which no token changes again."""
        size = self._block_size
        for i in range(len(self.digests), num_final // size):
            tokens = np.asarray(token_ids[i * size : (i + 1) * size], np.int64)
            self._last = hashlib.sha256(self._last + tokens.tobytes()).digest()
            self.digests.append(self._last)
