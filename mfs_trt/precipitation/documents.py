"""Documents to train on, out of local files: text, JSON lines, parquet, `datasets` folders, chats.

What a file holds follows from its name:

    .txt      one document; a line that holds only the tokenizer's end token begins another
    .jsonl    a row a line: a JSON object
    .parquet  a row a row
    folder    its files and folders in the order of their names, those that begin with `.` or `_`
              left out; a folder that `datasets` saved is read by that package (of several splits,
              `train`; give another split's own folder to read that one)

A row's text is under `text_key`. A row with the key `messages` is a chat: written by the
tokenizer's chat template, loss on the assistant's turns only. Empty texts are passed over; a file
without any document is an error. Documents of any length are welcome: packing lays them across
sequences.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mfs_trt.errors import ConfigError, InvalidRequestError
from mfs_trt.precipitation.assistant_turns import encode_chat
from mfs_trt.precipitation.rows import (
    Row,
    is_saved_dataset,
    json_rows,
    parquet_rows,
    saved_rows,
    text_rows,
)
from mfs_trt.tokenizer import Tokenizer

MESSAGES_KEY = "messages"
SUFFIXES = (".txt", ".jsonl", ".parquet")


@dataclass(frozen=True, eq=False)
class Document:
    token_ids: np.ndarray  # [n] int32, n at least 1
    is_trained: np.ndarray  # [n] bool: loss is taken on predicting this token


def read_documents(
    path: Path | str, tokenizer: Tokenizer, *, text_key: str = "text"
) -> Iterator[Document]:
    """The documents of a file or folder, one at a time, always in the same order.

    Raises `ConfigError`, naming file and line (or row), for what cannot be read: nothing there, an
    unknown kind of file, bytes that are not UTF-8, a line that is not JSON, a missing key, a wrong
    type, messages without roles, a file without documents, a package that is not installed.
    """
    for file in data_files(path):
        is_empty = True
        for row in _rows(file, tokenizer, text_key):
            document = _document(row, tokenizer, text_key)
            if document is not None:
                is_empty = False
                yield document
        if is_empty:
            raise ConfigError(f"{file}: expected at least one document, got none")


def data_files(path: Path | str) -> list[Path]:
    """The files and saved datasets that `path` stands for, in reading order. Raises ConfigError."""
    path = Path(path)
    if not path.exists():
        raise ConfigError(f"{path}: expected a data file or folder, got nothing there")
    if path.is_dir() and not is_saved_dataset(path):
        inner = sorted(entry for entry in path.iterdir() if entry.name[0] not in "._")
        files = [file for entry in inner for file in data_files(entry)]
        if not files:
            raise ConfigError(f"{path}: expected files of {', '.join(SUFFIXES)}, got none")
        return files
    if path.is_file() and path.suffix not in SUFFIXES:
        raise ConfigError(f"{path}: expected a file of {', '.join(SUFFIXES)}, got {path.name!r}")
    return [path]


def _rows(file: Path, tokenizer: Tokenizer, text_key: str) -> Iterator[Row]:
    if file.is_dir():
        return saved_rows(file)
    if file.suffix == ".txt":
        ends = {tokenizer.piece(token_id) for token_id in tokenizer.end_token_ids}
        return text_rows(file, text_key, ends)
    return {".jsonl": json_rows, ".parquet": parquet_rows}[file.suffix](file)


def _document(row: Row, tokenizer: Tokenizer, text_key: str) -> Document | None:
    """The document of a row; None for an empty text. Raises ConfigError naming the row."""
    where, values = row
    try:
        if MESSAGES_KEY in values:
            return Document(*encode_chat(_checked_messages(values[MESSAGES_KEY]), tokenizer))
        if text_key not in values:
            raise ConfigError(
                f"{where}: expected the key {text_key!r} or {MESSAGES_KEY!r}, "
                f"got {', '.join(map(repr, values)) or 'no key'}"
            )
        text = values[text_key]
        if text == "":
            return None
        token_ids = np.asarray(tokenizer.encode(text), dtype=np.int32)
    except InvalidRequestError as error:
        raise ConfigError(f"{where}: {error}") from error
    return Document(token_ids, np.ones(len(token_ids), dtype=bool)) if len(token_ids) else None


def _checked_messages(messages: Any) -> list[dict[str, str]]:
    if not isinstance(messages, list):
        raise InvalidRequestError(f"messages: expected a list, got {type(messages).__name__}")
    return messages
