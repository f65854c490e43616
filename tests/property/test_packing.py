"""Laws of packed tokens, for any documents: nothing is lost or doubled, and order is a function."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mfs_trt.precipitation.documents import Document
from mfs_trt.precipitation.packing import IGNORED, PackedTokens

END = 0
FLAGGED = st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=1, max_size=25)
CORPORA = st.lists(FLAGGED, min_size=1, max_size=8)
LENGTHS = st.integers(1, 12)
SEEDS = st.integers(0, 2**40)


def pack(corpus: list, seq_length: int, seed: int) -> PackedTokens:
    documents = (
        Document(np.array([t for t, _ in d], np.int32), np.array([f for _, f in d], bool))
        for d in corpus
    )
    return PackedTokens.from_documents(documents, seq_length, seed, end_token_id=END)


def joined(corpus: list) -> list[tuple[int, bool]]:
    """The slow twin: tokens and flags of all documents, an end token behind each lacking one."""
    stream = []
    for flagged in corpus:
        stream += flagged
        if flagged[-1][0] != END:
            stream.append((END, flagged[-1][1]))
    return stream


def expected_sequences(corpus: list, seq_length: int) -> list[tuple]:
    """The slow twin: input ids and labels of each sequence, along the stream."""
    stream = joined(corpus)
    labels = [after if flag else IGNORED for _, (after, flag) in pairwise(stream)] + [IGNORED]
    ids = [token for token, _ in stream]
    while len(ids) % seq_length:
        ids.append(END)
        labels.append(IGNORED)
    cuts = range(0, len(ids), seq_length)
    return [(tuple(ids[i : i + seq_length]), tuple(labels[i : i + seq_length])) for i in cuts]


def sequences(packed: PackedTokens, epoch: int = 0) -> list[tuple]:
    positions = range(epoch * packed.num_sequences, (epoch + 1) * packed.num_sequences)
    return [tuple(tuple(part.tolist()) for part in packed.sequence(p)) for p in positions]


@settings(max_examples=60, deadline=None)
@given(CORPORA, LENGTHS, SEEDS, st.integers(0, 3))
def test_every_token_is_an_input_and_a_label_once_an_epoch(corpus, seq_length, seed, epoch):
    assume(len(joined(corpus)) >= 2)
    found = sequences(pack(corpus, seq_length, seed), epoch)
    assert sorted(found) == sorted(expected_sequences(corpus, seq_length))


@settings(max_examples=60, deadline=None)
@given(CORPORA, LENGTHS, SEEDS)
def test_resuming_is_a_position(corpus, seq_length, seed):
    assume(len(joined(corpus)) >= 2)
    whole = pack(corpus, seq_length, seed)
    count = 2 * whole.num_sequences + 1
    expected = [whole.sequence(position) for position in range(count)]
    for position in range(count):
        resumed = pack(corpus, seq_length, seed) if position % 5 == 0 else whole
        input_ids, labels = resumed.batch(position, 1)
        assert input_ids[0].tolist() == expected[position][0].tolist()
        assert labels[0].tolist() == expected[position][1].tolist()


@settings(max_examples=20, deadline=None)
@given(st.integers(30, 60), SEEDS)
def test_order_differs_between_epochs_and_seeds_and_from_the_streams(num_sequences, seed):
    """With 30 sequences or more, two equal orders by chance are out of the question."""
    corpus = [[(1 + i, True) for i in range(num_sequences)]]
    orders = [
        sequences(pack(corpus, 1, seed + more), epoch) for more in range(2) for epoch in range(3)
    ]
    orders.append(expected_sequences(corpus, 1))
    assert len({tuple(order) for order in orders}) == len(orders)
    assert len({frozenset(order) for order in orders}) == 1


@settings(max_examples=60, deadline=None)
@given(CORPORA, LENGTHS, SEEDS, st.integers(1, 5))
def test_split_parts_are_the_stream_cut_in_two(corpus, seq_length, seed, num_eval):
    stream = joined(corpus)
    num_train = -(-len(stream) // seq_length) - num_eval
    cut = num_train * seq_length
    assume(num_train >= 1 and cut >= 2 and len(stream) - cut >= 2)
    train, held_out = pack(corpus, seq_length, seed).split(num_eval)
    whole = expected_sequences(corpus, seq_length)
    ids, labels = whole[num_train - 1]
    expected_train = [*whole[: num_train - 1], (ids, (*labels[:-1], IGNORED))]
    assert sorted(sequences(train)) == sorted(expected_train)
    assert sorted(sequences(held_out)) == sorted(whole[num_train:])


@pytest.mark.parametrize("seq_length", [1, 7, 64])
def test_ranks_of_equal_numbers_of_sequences_are_a_permutation(seq_length):
    packed = pack([[(5, True)] * 1000], seq_length, seed=1)
    for epoch in (0, 1, 10**9):
        order = packed._epoch_order(epoch)
        assert sorted(order.tolist()) == list(range(packed.num_sequences))
