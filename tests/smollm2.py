"""Prompts for SmolLM2, and what Hugging Face's model makes of them."""

from typing import Any

import torch

MAX_TOKENS = 24
PROMPTS = (
    "A",
    "The capital of France",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "1, 1, 2, 3, 5, 8,",
    "Water boils at 100 degrees Celsius at sea level. On a high mountain it boils at",
    "Dear Sir or Madam,\n\nI am writing to complain about the noise that your dog makes at night.",
    "Grüße aus München! Das Wetter ist heute",
    "Q: What is the largest planet of the solar system?\nA: Jupiter.\n"
    "Q: What is the smallest planet of the solar system?\nA:",
    "The history of computing is longer than most people think. " * 12 + "It begins with",
)


def generate_greedily(hf: Any, token_ids: list[int], end_token_ids: tuple[int, ...]) -> list[int]:
    """The new tokens of `transformers`' own greedy search."""
    ids = torch.tensor([token_ids])
    out = hf.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=MAX_TOKENS,
        do_sample=False,
        eos_token_id=list(end_token_ids),
        pad_token_id=0,
    )
    return out[0, len(token_ids) :].tolist()
