"""Prefix cache: keys say exactly what they stand for."""

from hypothesis import given, settings
from hypothesis import strategies as st

from mfs_trt.kv_cache.prefix_keys import BlockKey, TokenChain

TEXTS = st.text("ab\x00", max_size=4)


@st.composite
def contents(draw):
    """Segment, KV group, revision, salt and the tokens of one or more full blocks of two tokens."""
    tokens = draw(st.lists(st.sampled_from([0, 1, 256, 2**31 - 1]), min_size=2, max_size=6))
    place = draw(st.integers(0, 2)), draw(st.integers(0, 2))
    return *place, draw(TEXTS), draw(TEXTS), tuple(tokens[: len(tokens) // 2 * 2])


def key(content) -> BlockKey:
    segment, kv_group, revision, salt, tokens = content
    chain = TokenChain(revision, salt, block_size=2)
    chain.extend(tokens, len(tokens))
    return BlockKey(segment, kv_group, chain.digests[-1])


@settings(max_examples=500)
@given(contents(), contents())
def test_row_26_two_blocks_have_one_key_only_when_all_that_they_depend_on_is_equal(a, b):
    """Row 26: keys are injective over segment, KV group, revision, salt and tokens."""
    assert (key(a) == key(b)) == (a == b)


@given(st.lists(st.integers(0, 60), min_size=1, max_size=40), st.data())
def test_a_chain_that_grows_piece_by_piece_is_the_chain_of_the_whole(tokens, data):
    whole, grown = TokenChain("r", "", 3), TokenChain("r", "", 3)
    whole.extend(tokens, len(tokens))
    for stop in sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=4))):
        grown.extend(tokens, stop)
    grown.extend(tokens, len(tokens))
    assert grown.digests == whole.digests and len(whole.digests) == len(tokens) // 3
