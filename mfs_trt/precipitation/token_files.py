"""Data as packed tokens, kept in a file so that the next run need not tokenise it again.

A kept file's name is a digest of all that its tokens follow from: the data's bytes, the tokenizer,
the text's key. It is memory-mapped: a corpus larger than memory trains as well.
"""

import hashlib
from pathlib import Path

from mfs_trt.errors import ConfigError
from mfs_trt.precipitation.documents import data_files, read_documents
from mfs_trt.precipitation.packing import PackedTokens
from mfs_trt.tokenizer import Tokenizer

_FORMAT = b"1"  # changes with the meaning of a stream
_SUFFIX = ".tokens.npy"
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
)  # fmt: skip


def read_packed(
    path: Path | str,
    tokenizer: Tokenizer,
    seq_length: int,
    seed: int,
    *,
    text_key: str = "text",
    cache: Path | None = None,
) -> PackedTokens:
    """Packed tokens of a file or folder, by way of a token file in the folder `cache` if given.

    Raises `ConfigError` for data that cannot be read, and for a tokenizer without an end token.
    """
    if not tokenizer.end_token_ids:
        raise ConfigError(f"{tokenizer.folder}: expected a tokenizer with an end token, got none")
    end_token_id = tokenizer.end_token_ids[0]
    file = None
    if cache is not None:
        file = Path(cache) / f"{_digest(path, tokenizer, text_key)}{_SUFFIX}"
        if file.exists():
            return PackedTokens.open(file, seq_length, seed, end_token_id=end_token_id)
    documents = read_documents(path, tokenizer, text_key=text_key)
    packed = PackedTokens.from_documents(documents, seq_length, seed, end_token_id=end_token_id)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        packed.save(file)
    return packed


def _digest(path: Path | str, tokenizer: Tokenizer, text_key: str) -> str:
    digest = hashlib.sha256(_FORMAT)
    inputs = [tokenizer.folder / name for name in _TOKENIZER_FILES]
    for source in data_files(path):
        found = sorted(source.rglob("*")) if source.is_dir() else [source]
        inputs += [file for file in found if file.is_file()]
    for file in inputs:
        if file.is_file():
            with file.open("rb") as stream:
                content = hashlib.file_digest(stream, "sha256").digest()
            digest.update(file.suffix.encode() + content)
    digest.update(text_key.encode())
    return digest.hexdigest()[:32]
