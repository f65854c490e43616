"""Tokenizer: text ↔ token ids of one family, and the chat template.

Wraps the tokenizer of a local folder. Turning a growing row of ids into text piece by piece is
`IncrementalDecoder`'s work, at the end of this file.
"""

import codecs
import json
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from mfs_trt.errors import FamilyError, InvalidRequestError

_ANCHOR = "\n"  # stands before a word so that no tokenizer adds a space of its own to the word
_BYTE_PIECE = re.compile("<0x[0-9A-Fa-f]{2}>")


class Tokenizer:
    """The tokenizer of a folder that `transformers.AutoTokenizer` can load without a network.

    Raises `FamilyError`, naming the folder, where there is none or it has no `tokenizer.json`.
    """

    def __init__(self, folder: str | Path) -> None:
        from transformers import AutoTokenizer

        if not Path(folder).is_dir():
            raise FamilyError(f"tokenizer: expected a folder, got {folder}")
        try:
            inner = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except Exception as error:  # transformers raises many kinds for a folder it cannot use
            raise FamilyError(f"{folder}: no tokenizer can be loaded: {error}") from error
        if not inner.is_fast:
            raise FamilyError(
                f"{folder}: expected a tokenizer with a tokenizer.json, got {type(inner).__name__}"
            )
        self.folder = Path(folder)
        self._inner: Any = inner
        self.special_tokens: dict[str, int] = {
            token.content: token_id
            for token_id, token in inner.added_tokens_decoder.items()
            if token.special
        }
        self.special_token_ids = frozenset(self.special_tokens.values())
        # This first call also ends any truncation set in the file: later calls only read shared
        # state, so encoding and decoding may run in different threads.
        self._anchor_ids = self.encode(_ANCHOR, add_special_tokens=False)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, the added ones included; a model's logits may be padded beyond it."""
        return len(self._inner)

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """The tokenizer's own end token, if it has one; a checkpoint may name more."""
        token_id = self._inner.eos_token_id
        return () if token_id is None else (token_id,)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Raises `InvalidRequestError` for what is not a Unicode text."""
        _check_text(text)
        return self._inner.encode(text, add_special_tokens=add_special_tokens, verbose=False)

    def encode_with_ends(self, text: str) -> tuple[list[int], list[int]]:
        """Token ids of a text and, for each, the character index in the text where it ends.

        No special tokens are added. The tokens of one character all end behind it. Raises
        `InvalidRequestError` for what is not a Unicode text.
        """
        _check_text(text)
        encoded = self._inner(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        return encoded["input_ids"], [end for _, end in encoded["offset_mapping"]]

    def apply_chat_template(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of a chat up to where the model's answer begins.

        Raises `InvalidRequestError` when there is no template, or the messages do not fit it.
        """
        text = self.render_chat(messages, add_generation_prompt=True)
        return self.encode(text, add_special_tokens=False)  # the template writes them itself

    def render_chat(self, messages: Sequence[dict[str, str]], add_generation_prompt: bool) -> str:
        """A chat as the template writes it, with or without the words that open an answer.

        Raises as `apply_chat_template`.
        """
        if not self._inner.chat_template:
            raise InvalidRequestError(
                f"messages: the tokenizer in {self.folder} has no chat template; send a prompt"
            )
        if not messages:
            raise InvalidRequestError("messages: expected at least one, got none")
        for message in messages:
            if not isinstance(message, dict) or not all(
                isinstance(message.get(key), str) for key in ("role", "content")
            ):
                raise InvalidRequestError(
                    f"messages: expected objects with strings 'role' and 'content', got {message!r}"
                )
        try:
            return self._inner.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            raise InvalidRequestError(
                f"messages: the chat template refuses them: {error}"
            ) from error

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of the ids; ids that the tokenizer does not know have no text."""
        ids = list(token_ids)
        if ids and not 0 <= min(ids) <= max(ids) < 2**32:
            raise InvalidRequestError(f"token ids: expected 0 or more, got {min(ids)}..{max(ids)}")
        return self._inner.decode(
            ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def encode_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Token ids of each word as it stands within a text, with and without a space before it."""
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            for form in (word, " " + word):
                found[self._encode_within_text(form)] = None
        return tuple(ids for ids in found if ids)

    def _encode_within_text(self, text: str) -> tuple[int, ...]:
        num_anchor = len(self._anchor_ids)
        ids = self.encode(_ANCHOR + text, add_special_tokens=False)
        if ids[:num_anchor] != self._anchor_ids:  # merged with the text
            return tuple(self.encode(text, add_special_tokens=False))
        return tuple(ids[num_anchor:])

    def piece(self, token_id: int) -> str | None:
        """The vocabulary's spelling of a token; None for an id that it does not have."""
        return self._inner.convert_ids_to_tokens(token_id)

    @cached_property
    def is_byte_level(self) -> bool:
        """Whether pieces spell bytes in GPT-2's alphabet, a text being the bytes of its tokens."""
        return self._decoder_types() in (["ByteLevel"], ["ByteLevel", "Fuse"])

    @cached_property
    def byte_fallback_ids(self) -> frozenset[int]:
        """Tokens `<0x00>`…`<0xFF>` that stand for a byte each; empty without such a rule."""
        if "ByteFallback" not in self._decoder_types():
            return frozenset()
        vocabulary = self._inner.get_vocab()
        return frozenset(i for piece, i in vocabulary.items() if _BYTE_PIECE.fullmatch(piece))

    def _decoder_types(self) -> list[str]:
        decoder = self._inner.backend_tokenizer.decoder
        if decoder is None:
            return []
        state = json.loads(decoder.__getstate__())
        return [part["type"] for part in state.get("decoders", [state])]


def _check_text(text: str) -> None:
    if not isinstance(text, str):
        raise InvalidRequestError(f"text: expected a string, got {type(text).__name__}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"text: expected valid Unicode, got {error}") from None


class IncrementalDecoder:
    """Text of a growing row of ids: all that `push` and `flush` return, joined, is their `decode`.

    A text is returned once no further token can change it: the bytes of a broken character wait for
    the rest, and a run of byte-fallback tokens waits for its end, because one bad byte spoils the
    whole run. The cost of a push depends on the ids of this push and the one before, not on the
    row's length.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        kind = _ByteText if tokenizer.is_byte_level else _WindowText
        self._text: _ByteText | _WindowText = kind(tokenizer)

    def push(self, token_ids: Sequence[int]) -> str:
        """Add ids; returns the text that they settle, possibly none."""
        ids = [
            i for i in token_ids if i not in self._skipped and self._tokenizer.piece(i) is not None
        ]
        return self._text.push(ids) if ids else ""

    def peek(self) -> str:
        """The text held back now, read as if no further token came."""
        return self._text.peek()

    def flush(self) -> str:
        """The text held back. No push may follow."""
        return self._text.peek()


class _ByteText:
    """Byte-level pieces: bytes go through an incremental UTF-8 decoder."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: list[int]) -> str:
        return self._utf8.decode(b"".join(map(self._bytes, token_ids)))

    def peek(self) -> str:
        held, _ = self._utf8.getstate()
        return held.decode("utf-8", "replace")

    def _bytes(self, token_id: int) -> bytes:
        piece = self._tokenizer.piece(token_id) or ""
        try:
            return bytes(_BYTE_OF_CHARACTER[character] for character in piece)
        except KeyError:  # an added token, spelt as it reads
            return piece.encode("utf-8")


class _WindowText:
    """Other pieces: decode a window that begins with tokens already returned; return what is new.

        ... returned | context (returned) | new | byte run (waits) |
                     ^ window begins here       ^ settled up to here

    A decoder may treat the row's first token differently (drop a leading space): hence the context.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._num_context = 0  # leading tokens of the window that the next window may leave out
        self._num_returned = 0  # characters of the window's text already returned
        self._byte_run: list[int] = []

    def push(self, token_ids: list[int]) -> str:
        byte_ids = self._tokenizer.byte_fallback_ids
        end = len(token_ids)
        while end and token_ids[end - 1] in byte_ids:
            end -= 1
        if not end:
            self._byte_run += token_ids
            return ""
        self._window += self._byte_run + token_ids[:end]
        self._byte_run = token_ids[end:]
        text = self._tokenizer.decode(self._window, skip_special_tokens=False)
        new = text[self._num_returned :]
        self._num_returned = len(text)
        context = self._window[self._num_context :]
        context_text = self._tokenizer.decode(context, skip_special_tokens=False)
        if context_text:  # otherwise a dropped leading space would be dropped a second time
            self._window, self._num_returned = context, len(context_text)
            self._num_context = len(context)
        return new

    def peek(self) -> str:
        if not self._byte_run:
            return ""
        text = self._tokenizer.decode(self._window + self._byte_run, skip_special_tokens=False)
        return text[self._num_returned :]


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable ones as themselves, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_alphabet()
