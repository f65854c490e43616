"""A chat as token ids, and which of them the assistant says.

    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello.<|im_end|>\\n
    ------------------------------------------------------- the chat before, ready for an answer
                                                            ^^^^^^^^^^^^^^^^ the turn

A turn begins where the model's answer would begin and ends with what closes it; white space that
the template writes behind that is nobody's.
"""

from collections.abc import Sequence

import numpy as np

from mfs_trt.errors import InvalidRequestError
from mfs_trt.tokenizer import Tokenizer

ROLE = "assistant"


def encode_chat(
    messages: Sequence[dict[str, str]], tokenizer: Tokenizer
) -> tuple[np.ndarray, np.ndarray]:
    """Token ids [n] int32 of the whole chat, and whether the assistant says each, [n] bool.

    A token belongs to a turn when it ends within it, so that a token which joins the template's
    last space to the answer's first word is part of the answer. Raises `InvalidRequestError` when
    no message is the assistant's, the template refuses the chat, or it writes a chat's beginning
    otherwise once more follows, so that the turns cannot be told.
    """
    text = tokenizer.render_chat(messages, add_generation_prompt=False)
    token_ids, ends = tokenizer.encode_with_ends(text)
    spans = [
        _span(messages, index, text, tokenizer)
        for index, message in enumerate(messages)
        if message["role"] == ROLE
    ]
    if not spans:
        raise InvalidRequestError(f"messages: expected one of the role {ROLE!r}, got none")
    where = np.asarray(ends, dtype=np.int64)
    is_said = np.zeros(len(where), dtype=bool)
    for start, end in spans:
        is_said |= (start < where) & (where <= end)
    return np.asarray(token_ids, dtype=np.int32), is_said


def _span(
    messages: Sequence[dict[str, str]], index: int, text: str, tokenizer: Tokenizer
) -> tuple[int, int]:
    """Character indices in `text` between which message `index`, an answer, stands."""
    through = tokenizer.render_chat(messages[: index + 1], add_generation_prompt=False)
    if index:
        before = tokenizer.render_chat(messages[:index], add_generation_prompt=True)
    else:  # no chat before it: up to the words that open an answer, as they would stand behind it
        prompted = tokenizer.render_chat(messages[:1], add_generation_prompt=True)
        opening = prompted.removeprefix(through)
        before = through[: through.find(opening) + len(opening)]
    if not (through.startswith(before) and text.startswith(through)):
        raise InvalidRequestError(
            f"messages: the chat template of {tokenizer.folder} writes the beginning of a chat "
            f"otherwise once more follows: message {index + 1} cannot be told from the others"
        )
    return len(before), len(through.rstrip())
