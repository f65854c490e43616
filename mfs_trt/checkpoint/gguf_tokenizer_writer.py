"""A tokenizer folder → GGUF metadata, where the format can express it: byte-level or sentencepiece
BPE.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from mfs_trt.checkpoint.gguf_tokenizer import PRE_TOKENIZERS, WHOLE_WORDS_FIRST, ranked_merges
from mfs_trt.errors import CheckpointError

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_WRITTEN_PRE_TOKENIZERS = ("gpt-2", "smollm", "llama-bpe", "qwen2", "tekken")
_SPACE = "▁"


def tokenizer_fields(folder: Path, vocab_size: int) -> dict[str, Any]:
    """Metadata of the tokenizer that `transformers.AutoTokenizer` loads from `folder`.

    The vocabulary is padded to the model's `vocab_size` with unused tokens; end tokens are the
    caller's. Raises `CheckpointError` naming what GGUF cannot express.
    """
    from transformers import AutoTokenizer

    outer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    tokenizer: Tokenizer = outer.backend_tokenizer
    state = json.loads(tokenizer.to_str())
    model = state["model"]
    if model["type"] != "BPE":
        raise _refusal(f"a model of type {model['type']}", "BPE")
    is_spaced = bool(model.get("byte_fallback"))
    fields = _sentencepiece(state) if is_spaced else _byte_level(state)
    tokens, types = _vocabulary(tokenizer, state, vocab_size, is_spaced)
    fields["tokenizer.ggml.tokens"] = tokens
    fields["tokenizer.ggml.token_type"] = types
    if is_spaced:
        fields["tokenizer.ggml.scores"] = _scores(tokens, model)
    for theirs, token_id in (
        ("bos", outer.bos_token_id),
        ("unknown", outer.unk_token_id),
        ("padding", outer.pad_token_id),
    ):
        if token_id is not None:
            fields[f"tokenizer.ggml.{theirs}_token_id"] = token_id
    added = outer.encode("")
    if added not in ([], [outer.bos_token_id]):
        raise _refusal(f"tokens {added} around every text", "at most the begin token before it")
    fields["tokenizer.ggml.add_bos_token"] = bool(added)
    if isinstance(outer.chat_template, str):
        fields["tokenizer.chat_template"] = outer.chat_template
    return fields


def _byte_level(state: dict[str, Any]) -> dict[str, Any]:
    """Find the pre-tokenizer among those that have a name in GGUF."""
    wanted = _plain(state["pre_tokenizer"])
    for name in _WRITTEN_PRE_TOKENIZERS:
        if wanted == _plain(json.loads(PRE_TOKENIZERS[name].__getstate__())):
            break
    else:
        raise _refusal("a pre-tokenizer of its own", f"that of {_WRITTEN_PRE_TOKENIZERS}")
    normalizer = (state["normalizer"] or {}).get("type")
    if normalizer is not None and (normalizer, name) != ("NFC", "qwen2"):
        raise _refusal(f"a normalizer {normalizer}", "none")
    ignore_merges = bool(state["model"].get("ignore_merges"))
    if ignore_merges != (name in WHOLE_WORDS_FIRST):
        raise _refusal(f"ignore_merges {ignore_merges}", f"{not ignore_merges} with {name}'s cuts")
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": name,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in _merges(state["model"])],
    }


def _sentencepiece(state: dict[str, Any]) -> dict[str, Any]:
    """Spaces as ▁, with one before the text or not; no cutting into words."""
    normalizers = state["normalizer"] or {"type": "Sequence", "normalizers": []}
    parts = normalizers.get("normalizers", [normalizers])
    kinds = [part["type"] for part in parts]
    pre = state["pre_tokenizer"]
    if kinds == [] and pre and pre["type"] == "Metaspace" and pre.get("split") is False:
        has_prefix = pre["prepend_scheme"] != "never"
    elif kinds in (["Prepend", "Replace"], ["Replace"]) and pre is None:
        has_prefix = kinds[0] == "Prepend"
        if parts[-1]["pattern"] != {"String": " "} or parts[-1]["content"] != _SPACE:
            raise _refusal(f"a normalizer {parts[-1]}", f"spaces replaced by {_SPACE}")
    else:
        raise _refusal(f"normalizers {kinds} and pre-tokenizer {pre}", "those of sentencepiece")
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.add_space_prefix": has_prefix,
    }


def _vocabulary(
    tokenizer: Tokenizer, state: dict[str, Any], vocab_size: int, is_spaced: bool
) -> tuple[list[str], list[int]]:
    """Tokens by id and their types."""
    tokens = [f"[PAD{i}]" for i in range(vocab_size)]
    types = [_UNUSED] * vocab_size
    for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items():
        if token_id >= vocab_size:
            raise _refusal(f"the token {token!r} with id {token_id}", f"ids below {vocab_size}")
        is_byte = is_spaced and len(token) == 6 and token.startswith("<0x") and token[-1] == ">"
        tokens[token_id] = token
        types[token_id] = _BYTE if is_byte else _NORMAL
    unknown = state["model"].get("unk_token")
    for added in state["added_tokens"]:
        if added["lstrip"] or added["rstrip"] or added["single_word"]:
            raise _refusal(f"the token {added['content']!r} that takes spaces", "plain ones")
        types[added["id"]] = _CONTROL if added["special"] else _USER_DEFINED
        if added["content"] == unknown:
            types[added["id"]] = _UNKNOWN
    return tokens, types


def _scores(tokens: list[str], model: dict[str, Any]) -> list[float]:
    """Minus the rank of the first merge that makes a token; checked to give the same merges."""
    merges = _merges(model)
    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(merges):
        ranks.setdefault(left + right, rank)
    scores = [-float(ranks.get(token, len(merges))) for token in tokens]
    if ranked_merges(model["vocab"], scores) != merges:
        raise _refusal("merges that are not ranked by the token they make", "sentencepiece's order")
    return scores


def _merges(model: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        tuple(merge.split(" ", 1)) if isinstance(merge, str) else tuple(merge)
        for merge in model["merges"]
    ]


def _plain(part: Any) -> Any:
    """A pre-tokenizer's state without what does not change its cuts."""
    if isinstance(part, dict):
        return {key: _plain(value) for key, value in part.items() if key != "trim_offsets"}
    return [_plain(value) for value in part] if isinstance(part, list) else part


def _refusal(found: str, expected: str) -> CheckpointError:
    return CheckpointError(
        f"tokenizer: GGUF expects {expected}, this one has {found}; "
        "--no-tokenizer writes the file without it"
    )
