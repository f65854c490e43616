"""PackedTokens: what the sequences hold, their order, splits; files of tokens."""

import numpy as np
import pytest
import torch

from mfs_trt.errors import ConfigError
from mfs_trt.precipitation.documents import Document
from mfs_trt.precipitation.packing import IGNORED, PackedTokens, join

END = 9
FIRSTS_OF_SEED_7 = [
    42,
    26,
    22,
    34,
    18,
    14,
    10,
    30,
    46,
    38,
    38,
    46,
]  # of 10 sequences that begin with 10, 14, 18 …


def document(*token_ids: int, untrained: int = 0) -> Document:
    """A document whose first tokens are not trained."""
    return Document(np.array(token_ids, np.int32), np.arange(len(token_ids)) >= untrained)


def packed(*documents: Document, seq_length: int = 4, seed: int = 0) -> PackedTokens:
    return PackedTokens.from_documents(documents, seq_length, seed, end_token_id=END)


def in_stream_order(tokens: PackedTokens) -> list[tuple[list[int], list[int]]]:
    """All sequences of an epoch, sorted by content; the tests' first ids rise along the stream."""
    pairs = (tokens.sequence(position) for position in range(tokens.num_sequences))
    return sorted((input_ids.tolist(), labels.tolist()) for input_ids, labels in pairs)


def test_labels_are_the_next_tokens_across_documents_and_cuts():
    tokens = packed(document(1, 2, 3, 4, 5), document(6, 7))
    assert tokens.num_tokens == 9  # with two end tokens
    assert in_stream_order(tokens) == [
        ([1, 2, 3, 4], [2, 3, 4, 5]),
        ([5, END, 6, 7], [END, 6, 7, END]),
        ([END, END, END, END], [IGNORED] * 4),
    ]


def test_the_last_sequence_is_filled_with_end_tokens_without_loss():
    assert in_stream_order(packed(document(1, 2))) == [([1, 2, END, END], [2, END, -100, -100])]


def test_untrained_tokens_are_inputs_but_no_labels():
    tokens = packed(document(1, 2, 3, 4, 5, untrained=3), seq_length=6)
    assert in_stream_order(tokens) == [([1, 2, 3, 4, 5, END], [-100, -100, 4, 5, END, -100])]


def test_an_added_end_token_is_trained_as_the_token_before_it():
    tokens = packed(document(1, 2, untrained=2), document(3), seq_length=5)
    assert in_stream_order(tokens) == [([1, 2, END, 3, END], [-100, -100, 3, END, -100])]


def test_an_end_token_that_a_document_brings_is_not_doubled():
    assert join([document(1, END), document(END), document(2)], END).tolist() == [
        1,
        END,
        END,
        2,
        END,
    ]


def test_a_document_longer_than_the_sequence_is_laid_across_sequences():
    tokens = packed(document(*[1] * 3, *[2] * 3, *[3] * 3), seq_length=3)
    assert [ids for ids, _ in in_stream_order(tokens)][:3] == [[1] * 3, [2] * 3, [3] * 3]


def test_token_id_zero_can_be_untrained():
    assert in_stream_order(packed(document(0, 0, 5, untrained=2)))[0][1] == [-100, 5, END, -100]


def test_batches_are_torch_int64_rows_of_consecutive_positions_over_the_end_of_an_epoch():
    tokens = packed(document(*range(1, 9)), seq_length=3)
    start = tokens.num_sequences - 1
    input_ids, labels = tokens.batch(start, 3)
    assert input_ids.dtype == labels.dtype == torch.int64
    assert input_ids.shape == labels.shape == (3, 3)
    for row in range(3):
        expected_ids, expected_labels = tokens.sequence(start + row)
        assert input_ids[row].tolist() == expected_ids.tolist()
        assert labels[row].tolist() == expected_labels.tolist()


def test_the_order_of_a_seed_never_changes():
    """A run that is resumed by another version must see the data it would have seen."""
    tokens = packed(document(*range(10, 49)), seq_length=4, seed=7)
    firsts = [int(tokens.sequence(position)[0][0]) for position in range(12)]
    assert firsts == FIRSTS_OF_SEED_7


def test_going_back_a_position_gives_the_same_sequence_again():
    tokens = packed(document(*range(10, 49)), seq_length=4, seed=7)
    late, early = tokens.sequence(35), tokens.sequence(3)
    assert np.array_equal(tokens.sequence(35), late) and np.array_equal(tokens.sequence(3), early)


def test_split_gives_the_last_sequences_whatever_the_seed_and_shares_no_label():
    documents = [document(*range(10, 31))]
    held_out = set()
    for seed in range(4):
        train, evaluation = packed(*documents, seed=seed).split(2)
        assert (train.num_sequences, evaluation.num_sequences) == (4, 2)
        held_out.add(str(in_stream_order(evaluation)))
        seen = {token for ids, labels in in_stream_order(train) for token in (*ids, *labels)}
        assert seen - {IGNORED, END} == set(range(10, 26))
    assert len(held_out) == 1
    assert in_stream_order(evaluation)[-1] == ([30, END, END, END], [END, -100, -100, -100])


@pytest.mark.parametrize("count", [0, -1, 6, 7])
def test_a_split_that_leaves_nothing_is_refused(count):
    with pytest.raises(ConfigError, match=f"expected 1 to 5 of 6, got {count}"):
        packed(document(*range(10, 31))).split(count)


@pytest.mark.parametrize(
    ("documents", "options", "message"),
    [
        ([], {}, "data: expected two tokens or more, got 0"),
        ([document(1)], {"seq_length": 0}, "sequence length: expected 1 or more, got 0"),
        ([document(1)], {"seed": -1}, "seed: expected 0 or more, got -1"),
    ],
)
def test_settings_that_make_no_sequence_are_refused(documents, options, message):
    with pytest.raises(ConfigError, match=message):
        packed(*documents, **options)


def test_a_saved_stream_opens_memory_mapped_and_gives_the_same_sequences(tmp_path):
    tokens = packed(document(*range(10, 31), untrained=5))
    tokens.save(tmp_path / "a.tokens.npy")
    opened = PackedTokens.open(tmp_path / "a.tokens.npy", 4, 0, end_token_id=END)
    assert isinstance(opened._stream, np.memmap)
    assert in_stream_order(opened) == in_stream_order(tokens)
    assert [file.name for file in tmp_path.iterdir()] == ["a.tokens.npy"]


@pytest.mark.parametrize("content", ["none", "text", "floats", "table"])
def test_a_file_that_holds_no_tokens_is_named(tmp_path, content):
    file = tmp_path / "a.tokens.npy"
    if content == "text":
        file.write_text("no array")
    elif content != "none":
        np.save(
            file, np.zeros(4, np.float32) if content == "floats" else np.zeros((2, 2), np.int32)
        )
    with pytest.raises(ConfigError, match=f"{file.name}: expected (a token file|tokens)"):
        PackedTokens.open(file, 4, 0, end_token_id=END)
