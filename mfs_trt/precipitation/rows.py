"""Rows of data files: where each stands, for messages about it, and its values by key."""

import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from mfs_trt.errors import ConfigError

Row = tuple[str, dict[str, Any]]  # "file:line" or "file, row 3"; key → value

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# as `save_to_disk` of datasets writes them: the files of one split; the file beside several
_SPLIT_FILES, _SPLITS_FILE = ("state.json", "dataset_info.json"), "dataset_dict.json"


def text_rows(file: Path, text_key: str, separators: Collection[str | None]) -> Iterator[Row]:
    """A row for the text between lines that hold only a separator. Raises ConfigError (UTF-8)."""
    lines: list[str] = []
    first = 1
    for number, line in _lines(file):
        if line.strip() in separators:
            yield f"{file}:{first}", {text_key: _joined(lines)}
            lines, first = [], number + 1
        else:
            lines.append(line)
    yield f"{file}:{first}", {text_key: _joined(lines)}


def json_rows(file: Path) -> Iterator[Row]:
    """A row a line; blank lines are passed over.

    Raises ConfigError naming file and line for a line that is not UTF-8, not JSON, not an object.
    """
    for number, line in _lines(file):
        if not line.strip():
            continue
        where = f"{file}:{number}"
        try:
            values = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{where}: expected a JSON object, got no JSON: {error}") from error
        except RecursionError:
            raise ConfigError(f"{where}: expected a JSON object, got one nested too deep") from None
        if not isinstance(values, dict):
            raise ConfigError(f"{where}: expected a JSON object, got {type(values).__name__}")
        yield where, values


def parquet_rows(file: Path) -> Iterator[Row]:
    """A row a row, in groups. Raises ConfigError without pyarrow, or for what it cannot read."""
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise ConfigError(f"{file}: needs pyarrow (pip install pyarrow): {error}") from error
    number = 0
    try:
        with ParquetFile(file) as table:
            for batch in table.iter_batches(batch_size=256):
                for values in batch.to_pylist():
                    number += 1
                    yield f"{file}, row {number}", values
    except (ArrowException, OSError) as error:
        raise ConfigError(f"{file}: expected a parquet file, got: {error}") from error


def is_saved_dataset(folder: Path) -> bool:
    """Whether `datasets`' `save_to_disk` wrote this folder: one split, or several in folders."""
    is_split = all((folder / name).is_file() for name in _SPLIT_FILES)
    return is_split or (folder / _SPLITS_FILE).is_file()


def saved_rows(folder: Path) -> Iterator[Row]:
    """Rows of a saved dataset; of several splits, `train`.

    Raises ConfigError without the package `datasets`, without a split `train`, or for what that
    package cannot read.
    """
    try:
        from datasets import load_from_disk
    except ImportError as error:
        raise ConfigError(f"{folder}: needs datasets (pip install datasets): {error}") from error
    if (folder / _SPLITS_FILE).is_file():
        folder = folder / "train"
        if not folder.is_dir():
            splits = sorted(entry.name for entry in folder.parent.iterdir() if entry.is_dir())
            raise ConfigError(
                f"{folder.parent}: expected a split 'train', got {', '.join(splits) or 'none'}"
            )
    try:
        dataset = load_from_disk(str(folder))
    except Exception as error:  # datasets raises many kinds for a folder it cannot use
        raise ConfigError(f"{folder}: expected a saved dataset, got: {error}") from error
    for number, values in enumerate(dataset, start=1):
        yield f"{folder}, row {number}", values


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    """Lines from 1, without their ends, `\\n` or `\\r\\n`."""
    try:
        with file.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                if number == 1:
                    line = line.removeprefix(_BYTE_ORDER_MARK)
                yield number, line.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{file}:{number}: expected UTF-8, got byte 0x{error.object[error.start]:02x} "
            f"at byte {error.start + 1} of the line"
        ) from error
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from error


def _joined(lines: list[str]) -> str:
    text = "\n".join(lines)
    return text if text.strip() else ""
