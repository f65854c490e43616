"""Tokenizers trained on the spot, one of each kind whose decoder behaves differently."""

import json
from pathlib import Path

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from mfs_trt.tokenizer import Tokenizer

KINDS = ("byte_level", "metaspace_byte_fallback", "metaspace_unigram")
END = "<|im_end|>"
ADDED = "[grüß dich]"  # a token outside the model's vocabulary, not special
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_SPECIAL = ["<unk>", "<|im_start|>", END]
_CORPUS = [
    "Hello world, how are you today? I am fine, thank you.",
    "The stop word may stand anywhere in a text; stop when it comes.  Two  spaces.",
    "One two three four five six seven eight nine ten, and so on and on.",
    "Grüße aus München: schöne Straßen, süße Äpfel.",
    "naïve café, déjà vu, señor, piñata",
    "你好，世界。今天天气很好。",
    "def f(x):\n    return x + 1\n\n\nprint(f(2))",
] * 4


def build_tokenizer(
    kind: str, folder: Path, chat_template: str | None = CHAT_TEMPLATE
) -> Tokenizer:
    """Train a tokenizer of a few hundred tokens, save it to `folder` and open it from there."""
    backend = {
        "byte_level": _byte_level,
        "metaspace_byte_fallback": _metaspace_byte_fallback,
        "metaspace_unigram": _metaspace_unigram,
    }[kind]()
    backend.add_tokens([AddedToken(ADDED, special=False, normalized=False)])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END, unk_token="<unk>")
    wrapped.chat_template = chat_template
    wrapped.save_pretrained(folder)
    return Tokenizer(folder)


def _byte_level() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        _CORPUS,
        trainers.BpeTrainer(
            vocab_size=420,
            special_tokens=_SPECIAL,
            initial_alphabet=alphabet,
            show_progress=False,
        ),
    )
    return backend


def _metaspace_byte_fallback() -> Backend:
    """As LLaMA-2's: unknown characters become byte tokens; one leading space is stripped."""
    trained = Backend(models.BPE(unk_token="<unk>"))
    normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained.normalizer = normalizer
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")  # words stay apart
    trained.train_from_iterator(
        [line for line in _CORPUS if line.isascii() and "\n" not in line],
        trainers.BpeTrainer(vocab_size=130, special_tokens=_SPECIAL, show_progress=False),
    )
    model = json.loads(trained.to_str())["model"]
    vocab = model["vocab"]
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    vocab[""] = len(vocab)  # a piece without text, as padded vocabularies have
    merges = [tuple(merge) for merge in model["merges"]]
    backend = Backend(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = normalizer
    backend.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL])
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return backend


def _metaspace_unigram() -> Backend:
    """As T5's: the decoder drops the space marks of the first token."""
    backend = Backend(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.train_from_iterator(
        _CORPUS,
        trainers.UnigramTrainer(
            vocab_size=200, special_tokens=_SPECIAL, unk_token="<unk>", show_progress=False
        ),
    )
    return backend
