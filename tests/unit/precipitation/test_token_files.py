"""read_packed: data tokenised once, and again when anything that the tokens follow from changes."""

import json
from pathlib import Path

import pytest

from mfs_trt.errors import ConfigError
from mfs_trt.precipitation import token_files
from mfs_trt.precipitation.token_files import read_packed
from mfs_trt.tokenizer import Tokenizer
from tiny_tokenizers import CHAT_TEMPLATE, build_tokenizer


@pytest.fixture
def tokenizer(tmp_path) -> Tokenizer:
    return build_tokenizer("byte_level", tmp_path / "tokenizer")


@pytest.fixture
def data(tmp_path) -> Path:
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps({"text": "One two three.", "other": "Four five."}) + "\n")
    return file


def epoch(path: Path, tokenizer: Tokenizer, **options) -> list[list[list[int]]]:
    packed = read_packed(path, tokenizer, 8, 0, **options)
    return [tensor.tolist() for tensor in packed.batch(0, packed.num_sequences)]


def test_documents_are_closed_by_the_tokenizers_end_token(data, tokenizer):
    packed = read_packed(data, tokenizer, 64, 0)
    ids = packed.sequence(0)[0][: packed.num_tokens].tolist()
    assert ids == [*tokenizer.encode("One two three."), *tokenizer.end_token_ids]


def test_the_second_run_reads_the_kept_tokens_and_not_the_data(
    data, tokenizer, tmp_path, monkeypatch
):
    plain = epoch(data, tokenizer)
    assert epoch(data, tokenizer, cache=tmp_path / "cache") == plain
    monkeypatch.delattr(token_files, "read_documents")
    assert epoch(data, tokenizer, cache=tmp_path / "cache") == plain


@pytest.mark.parametrize("change", ["data", "key", "tokenizer", "template", "another file"])
def test_any_change_of_what_the_tokens_follow_from_is_seen(data, tokenizer, tmp_path, change):
    cache, path, options = tmp_path / "cache", data, {}
    if change == "another file":
        path = tmp_path / "folder"
        path.mkdir()
        (path / "a.jsonl").write_bytes(data.read_bytes())
    epoch(path, tokenizer, cache=cache)
    if change == "data":
        data.write_text(data.read_text().replace("One", "Two"))
    elif change == "key":
        options["text_key"] = "other"
    elif change == "another file":
        (path / "b.txt").write_text("Six.")
    else:
        kind = "metaspace_unigram" if change == "tokenizer" else "byte_level"
        template = "{{ messages }}" if change == "template" else CHAT_TEMPLATE
        tokenizer = build_tokenizer(kind, tmp_path / "other", chat_template=template)
    assert epoch(path, tokenizer, cache=cache, **options) == epoch(path, tokenizer, **options)
    assert len(list(cache.iterdir())) == 2


def test_bad_data_leaves_no_kept_file(tmp_path, tokenizer):
    file = tmp_path / "bad.jsonl"
    file.write_text('{"text": "One."}\nno JSON\n')
    with pytest.raises(ConfigError, match="bad.jsonl:2"):
        read_packed(file, tokenizer, 8, 0, cache=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_a_tokenizer_without_an_end_token_is_named(data, tokenizer):
    tokenizer._inner.eos_token = None
    with pytest.raises(ConfigError, match="expected a tokenizer with an end token"):
        read_packed(data, tokenizer, 8, 0)
