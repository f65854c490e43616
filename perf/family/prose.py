"""Prose out of plain-text books: one spelling of quotes and dashes, one line a paragraph, no verse,
headings and notes left out; a heading begins a new document.
"""

import re
from collections.abc import Iterator

_HEADING = re.compile(
    r"(CHAPTER|VOLUME|BOOK|PART|STORY|ADVENTURE)\b.{0,70}|[IVXL]+\.?(\s.{0,60})?|\d+\.?"
    r"|FINIS\.?|THE END\.?",
    re.IGNORECASE,
)
_SPELLING = str.maketrans(
    {
        "\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2014": "--", "\u2013": "-",
        "\u2026": "...", "\u00a0": " ", "\ufeff": "", "_": "", "\r": "",
    }
)  # fmt: skip
_BRACKETED = re.compile(r"\[[^\]]*\]|\{[^}]*\}")


def normalise(text: str) -> str:
    """Straight quotes, `--` for dashes, no emphasis marks, no bracketed notes."""
    return _BRACKETED.sub("", text.translate(_SPELLING))


def documents_of(text: str) -> Iterator[str]:
    """The prose between headings; a line each paragraph."""
    paragraphs: list[str] = []
    for block in re.split(r"\n[ \t]*\n", text):
        lines = [line for line in block.split("\n") if line.strip()]
        paragraph = " ".join(" ".join(lines).split())
        if not paragraph or _is_verse(lines):
            continue
        if _is_heading(paragraph, lines):
            if paragraphs:
                yield "\n".join(paragraphs)
            paragraphs = []
        elif any(letter.isalpha() for letter in paragraph):
            paragraphs.append(paragraph)
    if paragraphs:
        yield "\n".join(paragraphs)


def _is_heading(paragraph: str, lines: list[str]) -> bool:
    if len(lines) > 3 or len(paragraph) > 160:
        return False
    if paragraph.upper() == paragraph and any(letter.isalpha() for letter in paragraph):
        return True
    return bool(_HEADING.fullmatch(paragraph)) and paragraph[-1] not in ',;"'


def _is_verse(lines: list[str]) -> bool:
    """Lines set in, or short lines that each begin with a capital."""
    if len(lines) < 2:
        return False
    if all(line.startswith("  ") for line in lines):
        return True
    capitals = sum(line.strip(" '\"(")[:1].isupper() for line in lines)
    return capitals == len(lines) >= 3 and max(map(len, lines)) < 60
