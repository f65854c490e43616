"""TextStream: the tokens of one sequence → the text that may leave the server, up to a stop word.

The text is that of an incremental decoder. With stop words, its end is held back as long as it may
still become one of them:

    ... returned | held: a beginning of a stop word | not settled yet by the decoder |
"""

from collections.abc import Iterable, Sequence

from mfs_trt.sampling_params import SamplingParams
from mfs_trt.tokenizer import IncrementalDecoder, Tokenizer

_BROKEN = "\ufffd"


class TextStream:
    """Text of one sequence, delta by delta.

    A sequence stops at the first token with which its text contains a stop word; the text ends
    before the stop word, and before the earliest where one token completes several. A stop word
    that is the name of a special token stops at that token, though it has no text. Stop words that
    are complete before the output has `params.min_tokens` tokens are ordinary text.

    `num_tokens_used` is, after a push, the number of its tokens up to and including the one that
    stopped the sequence; all of them when nothing did.
    """

    def __init__(
        self, tokenizer: Tokenizer, params: SamplingParams, stop_texts: Iterable[str] = ()
    ) -> None:
        self._decoder = IncrementalDecoder(tokenizer)
        self._stop_words = tuple(dict.fromkeys(w for w in (*params.stop, *stop_texts) if w))
        self._stop_token_ids = {
            tokenizer.special_tokens[word]
            for word in self._stop_words
            if word in tokenizer.special_tokens
        }
        self._longest = max(map(len, self._stop_words), default=0)
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._held = ""  # settled text that is not returned yet
        self._num_ignored = 0  # leading characters of the held text in which no stop word may end
        self._is_stopped = False
        self.num_tokens_used = 0

    @property
    def has_stop_words(self) -> bool:
        return bool(self._stop_words)

    def push(self, token_ids: Sequence[int], ends: bool = False) -> tuple[str, bool]:
        """Add tokens; returns the new text and whether a stop word ended it.

        `ends`: the last of the tokens is an end token, whose text is never returned. After an end
        without a stop word, `finish` has the rest of the text. After a stop, no token is used.
        """
        if self._is_stopped:
            self.num_tokens_used = 0
            return "", True
        self.num_tokens_used = len(token_ids)
        text_ids = token_ids[:-1] if ends else token_ids
        if not self._stop_words:
            return self._decoder.push(text_ids), False
        delta = ""
        for index, token_id in enumerate(text_ids):
            text, is_stopped = self._push_one(token_id)
            delta += text
            if is_stopped:
                self._is_stopped = True
                self.num_tokens_used = index + 1
                break
        return delta, self._is_stopped

    def finish(self) -> str:
        """The text still held; empty after a stop word."""
        if self._is_stopped:
            return ""
        held, self._held = self._held, ""
        return held + self._decoder.flush()

    def _push_one(self, token_id: int) -> tuple[str, bool]:
        self._num_tokens += 1
        self._held += self._decoder.push((token_id,))
        # Bytes of a run may yet turn out broken, but not if the sequence ends here.
        unsettled = self._decoder.peek()
        known = self._held if _BROKEN in unsettled else self._held + unsettled
        if self._num_tokens < self._min_tokens:
            self._num_ignored = max(self._num_ignored, len(known))
        elif token_id in self._stop_token_ids:
            return self._held + unsettled, True
        else:
            start = self._find_stop_word(known)
            if start >= 0:
                return known[:start], True
        return self._release(), False

    def _find_stop_word(self, text: str) -> int:
        """Where the earliest stop word begins that ends after the ignored part; -1: nowhere."""
        starts = (
            text.find(word, max(0, self._num_ignored - len(word) + 1)) for word in self._stop_words
        )
        return min((start for start in starts if start >= 0), default=-1)

    def _release(self) -> str:
        """Cut from the held text what cannot be the beginning of a stop word any more."""
        num_kept = min(len(self._held), self._longest - 1)
        while num_kept and not self._may_become_stop_word(self._held[-num_kept:]):
            num_kept -= 1
        num_released = len(self._held) - num_kept
        released, self._held = self._held[:num_released], self._held[num_released:]
        self._num_ignored = max(0, self._num_ignored - num_released)
        return released

    def _may_become_stop_word(self, text: str) -> bool:
        return any(len(word) > len(text) and word.startswith(text) for word in self._stop_words)
