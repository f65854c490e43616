"""A family whose draft tier agrees often with its top tier: trained here, on predictable text.

Sixteen layers of width 512 with exits after 2, 8 and 16, from scratch, on sentences that follow
each other at random but never change inside. About two minutes on two cores.
Usage: python perf/speculative_family.py OUT_FOLDER
"""

import random
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from family.train import MODEL

NOUNS = [
    "river",
    "miller",
    "garden",
    "captain",
    "lantern",
    "orchard",
    "letter",
    "teacher",
    "winter",
    "harbour",
]
VERBS = ["carries", "follows", "remembers", "mends", "crosses", "answers", "gathers"]
ENDS = ("before the rain", "at the old gate", "without a word", "in the early light")
EXITS = {"draft": 2, "medium": 8, "large": 16}
NUM_STEPS = 160


def sentences() -> list[str]:
    rng = random.Random(0)
    return [
        f"The {noun} {rng.choice(VERBS)} the {rng.choice(NOUNS)} {rng.choice(ENDS)}."
        for noun in NOUNS * 4
    ]


def text(num_sentences: int, seed: int) -> str:
    return " ".join(random.Random(seed).choices(sentences(), k=num_sentences))


def make_family(out: Path) -> None:
    from mfs_trt.cli.quickstart import SHIPPED
    from mfs_trt.family.spec import FamilySpec, TierSpec
    from mfs_trt.precipitation.config import PrecipitationConfig
    from mfs_trt.precipitation.documents import Document
    from mfs_trt.precipitation.initial import random_model
    from mfs_trt.precipitation.packing import PackedTokens
    from mfs_trt.precipitation.run import precipitate, write_model
    from mfs_trt.precipitation.trainer import StepReport
    from mfs_trt.precipitation.world import open_world
    from mfs_trt.tokenizer import Tokenizer

    tokenizer = Tokenizer(SHIPPED)
    model = replace(
        MODEL,
        hidden_size=512,
        intermediate_size=1408,
        num_layers=max(EXITS.values()),
        num_heads=8,
    )
    tiers = tuple(TierSpec(name, depth) for name, depth in EXITS.items())

    def documents() -> Iterator[Document]:
        for seed in range(200):
            ids = np.array(tokenizer.encode(text(40, seed)), np.int32)
            yield Document(ids, np.ones(len(ids), bool))

    def report(step: StepReport) -> None:
        if step.step % 20 == 0:
            print(step.step, {tier: round(loss, 3) for tier, loss in step.losses.items()})

    config = PrecipitationConfig(
        seq_length=128,
        batch_size=8,
        micro_batch_size=8,
        schedule="joint",
        num_steps=NUM_STEPS,
        learning_rate=1e-3,
        warmup_steps=10,
        max_grad_norm=1.0,
        distill_weight=0.5,
    )
    data = PackedTokens.from_documents(documents(), 128, 0, end_token_id=tokenizer.end_token_ids[0])
    with tempfile.TemporaryDirectory() as folder, open_world(False) as world:
        start = Path(folder) / "start"
        spec = FamilySpec(model, tiers, "", (), "float32", tokenizer.end_token_ids, "random")
        write_model(start, random_model(spec, seed=0), SHIPPED)
        precipitate(
            start,
            out,
            data,
            config,
            world,
            tiers=tiers,
            work=Path(folder) / "work",
            is_random=True,
            on_step=report,
        )


if __name__ == "__main__":
    make_family(Path(sys.argv[1]))
