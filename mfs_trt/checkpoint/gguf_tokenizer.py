"""The tokenizer inside a GGUF file → files that transformers.AutoTokenizer loads."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from mfs_trt.errors import CheckpointError

_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type that matter here
_SPECIAL = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _digits_apart() -> pre_tokenizers.PreTokenizer:
    parts = [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ]
    return pre_tokenizers.Sequence(parts)


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    parts = [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    return pre_tokenizers.Sequence(parts)


# tokenizer.ggml.pre → how a byte-level vocabulary cuts text before merging; llama.cpp's names.
PRE_TOKENIZERS: dict[str, pre_tokenizers.PreTokenizer] = {
    "default": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": _digits_apart(),
    "starcoder": _digits_apart(),
    "refact": _digits_apart(),
    "command-r": _digits_apart(),
    "llama-bpe": _split(_LLAMA3),
    "llama3": _split(_LLAMA3),
    "llama-v3": _split(_LLAMA3),
    "qwen2": _split(_QWEN2),
    "tekken": _split(_TEKKEN),
}
WHOLE_WORDS_FIRST = (
    "llama-bpe",
    "llama3",
    "llama-v3",
    "tekken",
)  # a word in the vocabulary is not merged
_ADD_BOS = (
    "llama-bpe",
    "llama3",
    "llama-v3",
    "tekken",
)  # unless tokenizer.ggml.add_bos_token says otherwise


def write_gguf_tokenizer(fields: Mapping[str, Any], folder: Path) -> bool:
    """Write tokenizer.json, its config and the chat template; False when there is no vocabulary.

    Raises `CheckpointError` naming a tokenizer model or pre-tokenizer that is not known.
    """
    from transformers import PreTrainedTokenizerFast

    if "tokenizer.ggml.tokens" not in fields:
        return False
    tokenizer = build_gguf_tokenizer(fields)
    tokens = fields["tokenizer.ggml.tokens"]
    special = {}
    for theirs, ours in _SPECIAL.items():
        token_id = fields.get(f"tokenizer.ggml.{theirs}_token_id")
        if token_id is not None:
            special[ours] = tokens[token_id]
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **special
    )
    wrapped.chat_template = fields.get("tokenizer.chat_template")
    wrapped.save_pretrained(folder)
    return True


def build_gguf_tokenizer(fields: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of the metadata `fields`, special tokens and BOS rule included."""
    kind = fields.get("tokenizer.ggml.model")
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if kind not in builders:
        raise CheckpointError(
            f"tokenizer.ggml.model: expected {' or '.join(builders)}, got {kind!r}; "
            "give a tokenizer folder instead"
        )
    tokenizer = builders[kind](fields)
    tokens = fields["tokenizer.ggml.tokens"]
    types = fields.get("tokenizer.ggml.token_type", [])
    for token, token_type in zip(tokens, types, strict=False):
        if token_type in (_CONTROL, _USER_DEFINED):
            special = token_type == _CONTROL
            added = AddedToken(token, normalized=False, special=special)
            add = tokenizer.add_special_tokens if special else tokenizer.add_tokens
            add([added])
    default = kind == "llama" or fields.get("tokenizer.ggml.pre") in _ADD_BOS
    begin = fields.get("tokenizer.ggml.bos_token_id")
    if fields.get("tokenizer.ggml.add_bos_token", default) and begin is not None:
        byte_level = tokenizer.post_processor
        template = processors.TemplateProcessing(
            single=f"{tokens[begin]} $A",
            pair=f"{tokens[begin]} $A {tokens[begin]}:1 $B:1",
            special_tokens=[(tokens[begin], begin)],
        )
        parts = [byte_level, template] if byte_level is not None else [template]
        tokenizer.post_processor = processors.Sequence(parts)
    return tokenizer


def _byte_level(fields: Mapping[str, Any]) -> Tokenizer:
    name = fields.get("tokenizer.ggml.pre", "default")
    if name not in PRE_TOKENIZERS:
        raise CheckpointError(
            f"tokenizer.ggml.pre: expected one of {', '.join(PRE_TOKENIZERS)}, got {name!r}; "
            "give a tokenizer folder instead"
        )
    tokenizer = Tokenizer(
        models.BPE(
            vocab=_vocabulary(fields),
            merges=[tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]],
            ignore_merges=name in WHOLE_WORDS_FIRST,
        )
    )
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[name]
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(fields: Mapping[str, Any]) -> Tokenizer:
    """A sentencepiece BPE vocabulary; its scores rank the merges, which the file does not list."""
    vocabulary = _vocabulary(fields)
    unknown = fields["tokenizer.ggml.tokens"][fields.get("tokenizer.ggml.unknown_token_id", 0)]
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=ranked_merges(vocabulary, fields["tokenizer.ggml.scores"]),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaced: list[normalizers.Normalizer] = [normalizers.Replace(" ", "▁")]
    parts: list[decoders.Decoder] = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if fields.get("tokenizer.ggml.add_space_prefix", True):
        spaced.insert(0, normalizers.Prepend("▁"))
        parts.append(decoders.Strip(content=" ", left=1))
    tokenizer.normalizer = normalizers.Sequence(spaced)
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer


def ranked_merges(vocabulary: Mapping[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to make a token from two others, best score first: sentencepiece's order."""
    ranked = []
    for token, token_id in vocabulary.items():
        pairs = [
            (vocabulary[token[:i]], vocabulary[token[i:]], token[:i], token[i:])
            for i in range(1, len(token))
            if token[:i] in vocabulary and token[i:] in vocabulary
        ]
        ranked += [(-scores[token_id], left, right) for _, _, left, right in sorted(pairs)]
    ranked.sort(key=lambda entry: entry[0])  # stable: equal scores keep the vocabulary's order
    return [(left, right) for _, left, right in ranked]


def _vocabulary(fields: Mapping[str, Any]) -> dict[str, int]:
    vocabulary: dict[str, int] = {}
    for token_id, token in enumerate(fields["tokenizer.ggml.tokens"]):
        vocabulary.setdefault(token, token_id)
    return vocabulary
