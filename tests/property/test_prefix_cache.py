"""Prefix cache: keys say exactly what they stand for, and no frame is lost in a long run."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from mfs_trt.kv_cache.block_pool import BlockPool
from mfs_trt.kv_cache.prefix_keys import TokenChain

TEXTS = st.text("ab\x00", max_size=4)


@st.composite
def contents(draw):
    """Revision, salt and the tokens of one or more full blocks of two tokens."""
    tokens = draw(st.lists(st.sampled_from([0, 1, 256, 2**31 - 1]), min_size=2, max_size=6))
    return draw(TEXTS), draw(TEXTS), tuple(tokens[: len(tokens) // 2 * 2])


def digest(content) -> bytes:
    revision, salt, tokens = content
    chain = TokenChain(revision, salt, block_size=2)
    chain.extend(tokens, len(tokens))
    return chain.digests[-1]


@settings(max_examples=500)
@given(contents(), contents())
def test_two_blocks_have_one_key_only_when_all_that_they_depend_on_is_equal(a, b):
    """Row 26: keys are injective over revision, salt and tokens."""
    assert (digest(a) == digest(b)) == (a == b)


@given(st.lists(st.integers(0, 60), min_size=1, max_size=40), st.data())
def test_a_chain_that_grows_piece_by_piece_is_the_chain_of_the_whole(tokens, data):
    whole, grown = TokenChain("r", "", 3), TokenChain("r", "", 3)
    whole.extend(tokens, len(tokens))
    for stop in sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=4))):
        grown.extend(tokens, stop)
    grown.extend(tokens, len(tokens))
    assert grown.digests == whole.digests and len(whole.digests) == len(tokens) // 3


def test_a_hundred_thousand_random_operations_lose_no_frame_and_no_content():
    """Row 32: allocate, free, share and evict against a model of who holds what."""
    rng = random.Random(0)
    pool = BlockPool(40)
    held: list = []  # owners of blocks
    content: dict = {}  # frames → what was written last
    next_key = 0
    for turn in range(100_000):
        action = rng.random()
        if action < 0.45:
            size = rng.choice((1, 1, 2, 3))
            if size <= pool.num_free_frames:
                block = pool.allocate(size)
                content[block.frames] = next_key
                if rng.random() < 0.7:
                    pool.register(block, next_key)
                next_key += 1
                held.append(block)
        elif action < 0.85:
            if held:
                pool.release(held.pop(rng.randrange(len(held))))
        elif next_key:
            block = pool.find(rng.randrange(max(0, next_key - 60), next_key))
            if block is not None:
                assert content[block.frames] == block.key, "evicted content was found"
                held.append(pool.share(block))
        if turn % 500 == 0:
            pool.check_integrity(held)
    for block in held:
        pool.release(block)
    pool.check_integrity([])
    assert pool.num_free_frames == pool.num_usable_frames and pool.num_evictions > 1000
