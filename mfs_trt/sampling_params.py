"""SamplingParams: how one request wants its tokens chosen, checked when it is made."""

from dataclasses import dataclass, fields
from math import isfinite

from mfs_trt.errors import InvalidRequestError

DEFAULT_MAX_TOKENS = 128


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request.

    Without `temperature`, `top_k`, `top_p` and `min_p`, or with `temperature` 0, `top_k` 1 or
    `top_p` 0 (the limit of a shrinking nucleus), decoding is greedy. Any other sampling parameter
    samples, with temperature 1 unless told otherwise.

    One `seed` gives one text: alone, and beside any other requests of any tiers, unless tiers draft
    for the request. Drafts take other random numbers, and which of them decides what depends on how
    the prompt was computed (chunks, cached prefixes) and on preemptions. The text follows the same
    law then, and is the same each time for a request alone that does not reuse prefixes.

    Raises `InvalidRequestError` naming the field, the allowed range and the value.
    """

    max_tokens: int = DEFAULT_MAX_TOKENS
    min_tokens: int = 0  # end tokens and stop words are not honoured before this many tokens
    temperature: float | None = None
    top_k: int = 0  # 0: off
    top_p: float | None = None
    min_p: float = 0.0  # tokens below min_p times the most likely one's probability are dropped
    n: int = 1  # sequences to return
    seed: int | None = None  # None: drawn at submission
    repetition_penalty: float = 1.0  # over prompt and output, multiplicative (CTRL, 2019)
    presence_penalty: float = 0.0  # over the output, additive once
    frequency_penalty: float = 0.0  # over the output, additive per occurrence
    stop: tuple[str, ...] = ()  # matched on text; the stop word is not part of the text
    bad_words: tuple[str, ...] = ()
    end_id: int | None = None  # None: the tokenizer's end tokens; -1: none
    ignore_eos: bool = False
    return_log_probs: bool = False  # of the unfiltered distribution, natural logarithm
    return_generation_logits: bool = False

    def __post_init__(self) -> None:
        for name in ("stop", "bad_words"):
            value = getattr(self, name)
            words = (value,) if isinstance(value, str) else tuple(value)
            object.__setattr__(self, name, words)
            for word in words:
                if not isinstance(word, str) or not word:
                    raise InvalidRequestError(f"{name}: expected non-empty strings, got {word!r}")
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, float) and not isfinite(value):
                raise InvalidRequestError(f"{field.name}: expected a finite number, got {value}")
        self._require("max_tokens", self.max_tokens >= 1, "at least 1")
        self._require("min_tokens", self.min_tokens >= 0, "at least 0")
        self._require(
            "temperature", self.temperature is None or self.temperature >= 0, "at least 0"
        )
        self._require("top_k", self.top_k >= 0, "at least 0 (0 is off)")
        self._require("top_p", self.top_p is None or 0 <= self.top_p <= 1, "between 0 and 1")
        self._require("min_p", 0 <= self.min_p <= 1, "between 0 and 1")
        self._require("n", 1 <= self.n <= 64, "between 1 and 64")
        self._require("seed", self.seed is None or 0 <= self.seed < 2**64, "an unsigned 64-bit")
        self._require("repetition_penalty", self.repetition_penalty > 0, "above 0")
        self._require("presence_penalty", -2 <= self.presence_penalty <= 2, "between -2 and 2")
        self._require("frequency_penalty", -2 <= self.frequency_penalty <= 2, "between -2 and 2")

    def _require(self, name: str, ok: bool, expected: str) -> None:
        if not ok:
            raise InvalidRequestError(f"{name}: expected {expected}, got {getattr(self, name)}")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken, without a random number."""
        if self.temperature == 0 or self.top_k == 1 or self.top_p == 0:
            return True
        return self.temperature is None and not self.top_k and self.top_p is None and not self.min_p

    @property
    def has_penalties(self) -> bool:
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )
