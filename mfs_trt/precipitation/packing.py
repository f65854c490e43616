"""Packed sequences of equal length, cut from documents that are joined by the end token.

    document 0 | end | document 1 | end | document 2 … | end | filling (end tokens, no loss)
    |---- sequence 0 ----|---- sequence 1 ----|---- sequence 2 ----|

Attention runs over a whole sequence, other documents included. Order is a function of the seed and
a position that counts sequences over epochs without end: resuming needs that one number.
"""

import os
from array import array
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch

from mfs_trt.errors import ConfigError
from mfs_trt.precipitation.documents import Document

IGNORED = -100  # label of a token on whose prediction no loss is taken; torch's default


class PackedTokens:
    """Sequences of `seq_length` tokens, a new order of them each epoch.

    Every token of every document stands in one sequence of an epoch; the one behind a sequence's
    last token is that token's label, so that no prediction is lost to the cut.
    """

    def __init__(
        self, stream: np.ndarray, seq_length: int, seed: int, *, end_token_id: int
    ) -> None:
        """`stream` [num_tokens] int32 (may be memory-mapped): ids; `~id` where no loss is taken.

        Raises `ConfigError` for a length, seed or stream that makes no sequence.
        """
        if seq_length < 1:
            raise ConfigError(f"sequence length: expected 1 or more, got {seq_length}")
        if seed < 0:
            raise ConfigError(f"seed: expected 0 or more, got {seed}")
        if len(stream) < 2:
            raise ConfigError(f"data: expected two tokens or more, got {len(stream)}")
        self.seq_length = seq_length
        self.seed = seed
        self.end_token_id = end_token_id
        self._stream = stream
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, dtype=np.int64))  # of an epoch

    @classmethod
    def from_documents(
        cls, documents: Iterable[Document], seq_length: int, seed: int, *, end_token_id: int
    ) -> "PackedTokens":
        """Read all documents and join them. An end token that a document brings is not doubled;
        loss is taken on one added when it is taken on the document's last token.
        """
        return cls(join(documents, end_token_id), seq_length, seed, end_token_id=end_token_id)

    @classmethod
    def open(cls, file: Path, seq_length: int, seed: int, *, end_token_id: int) -> "PackedTokens":
        """A stream that `save` wrote, memory-mapped. Raises `ConfigError` for another file."""
        try:
            stream = np.load(file, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{file}: expected a token file, got: {error}") from error
        if stream.dtype != np.int32 or stream.ndim != 1:
            raise ConfigError(
                f"{file}: expected tokens [num_tokens] int32, got {stream.shape} {stream.dtype}"
            )
        return cls(stream, seq_length, seed, end_token_id=end_token_id)

    def save(self, file: Path) -> None:
        """Write the stream as one array; replaces the file as a whole or not at all."""
        draft = file.with_name(f".{file.name}.{os.getpid()}")  # processes may write at once
        with draft.open("wb") as out:
            np.save(out, self._stream)
        draft.replace(file)

    @property
    def num_tokens(self) -> int:
        """Tokens of the documents and the end tokens between them, filling left out."""
        return len(self._stream)

    @property
    def num_sequences(self) -> int:
        """Sequences of an epoch."""
        return -(-len(self._stream) // self.seq_length)

    def sequence(self, position: int) -> tuple[np.ndarray, np.ndarray]:
        """Input ids and labels, both [seq_length] int64, of the sequence at a position.

        `labels[i]` is the token behind `input_ids[i]`, or `IGNORED`.
        """
        assert position >= 0, position
        epoch, index = divmod(position, self.num_sequences)
        start = int(self._epoch_order(epoch)[index]) * self.seq_length
        window = self._stream[start : start + self.seq_length + 1].astype(np.int64)
        is_trained = window >= 0
        ids = np.where(is_trained, window, ~window)
        input_ids = np.full(self.seq_length, self.end_token_id, dtype=np.int64)
        labels = np.full(self.seq_length, IGNORED, dtype=np.int64)
        input_ids[: len(ids)] = ids[: self.seq_length]
        labels[: len(ids) - 1] = np.where(is_trained, ids, IGNORED)[1:]
        return input_ids, labels

    def batch(self, position: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Input ids and labels, both [count, seq_length] int64, of the positions from one on."""
        sequences = [self.sequence(position + i) for i in range(count)]
        input_ids, labels = zip(*sequences, strict=True)
        return torch.from_numpy(np.stack(input_ids)), torch.from_numpy(np.stack(labels))

    def split(self, num_eval_sequences: int) -> tuple["PackedTokens", "PackedTokens"]:
        """The stream without its last sequences, and those: for training and for evaluation.

        No token of the second part is an input or a label of the first. Raises `ConfigError` when
        one of them would be empty.
        """
        num_train = self.num_sequences - num_eval_sequences
        if num_eval_sequences < 1 or num_train < 1:
            raise ConfigError(
                f"evaluation sequences: expected 1 to {self.num_sequences - 1} of "
                f"{self.num_sequences}, got {num_eval_sequences}"
            )
        cut = num_train * self.seq_length
        train, held_out = (
            PackedTokens(part, self.seq_length, self.seed, end_token_id=self.end_token_id)
            for part in (self._stream[:cut], self._stream[cut:])
        )
        return train, held_out

    def _epoch_order(self, epoch: int) -> np.ndarray:
        """A permutation of the sequences, [num_sequences] int64: ranks of the epoch's own numbers.

        Raw numbers of a bit generator, which numpy keeps the same for ever; `permutation` it does
        not.
        """
        known, order = self._order
        if known != epoch:
            numbers = np.random.Philox([self.seed, epoch]).random_raw(self.num_sequences)
            order = np.argsort(numbers, kind="stable")
            self._order = (epoch, order)
        return order


def join(documents: Iterable[Document], end_token_id: int) -> np.ndarray:
    """The stream [num_tokens] int32 of documents, each closed by the end token: a token's id, or
    `~id` where no loss is taken on it.
    """
    stream = array("i")
    assert stream.itemsize == 4
    for document in documents:
        ids = document.token_ids
        encoded = np.where(document.is_trained, ids, ~ids).astype(np.int32)
        stream.frombytes(encoded.tobytes())
        if ids[-1] != end_token_id:
            stream.append(end_token_id if document.is_trained[-1] else ~end_token_id)
    return np.frombuffer(stream, dtype=np.int32) if stream else np.empty(0, dtype=np.int32)
