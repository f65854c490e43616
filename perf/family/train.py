"""The trainings behind the family in `family/` and behind the table of `perf/family_compare.py`.

Each run is one `mfs-trt precipitate` command; runs that are done are passed over, an interrupted
one goes on. Usage: python perf/family/train.py CORPUS_FOLDER RUNS_FOLDER [RUN …]
"""

import argparse
import subprocess
import sys
from pathlib import Path

from mfs_trt.family.spec import FamilySpec, TierSpec
from mfs_trt.model_config import ModelConfig, RopeConfig
from mfs_trt.precipitation.initial import random_model
from mfs_trt.precipitation.run import write_model
from mfs_trt.tokenizer import Tokenizer

MODEL = ModelConfig(
    architecture="llama",
    vocab_size=4096,
    hidden_size=256,
    intermediate_size=672,
    num_layers=8,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    rms_norm_eps=1e-5,
    rope=RopeConfig(),
    max_position_embeddings=1024,
    tie_word_embeddings=True,
)
TIERS = "draft=2,small=4,medium=6,large=8"

COMMON = (
    "--seq-length 512 --batch-size 8 --micro-batch-size 8 --eval-sequences 64 --warmup-steps 40"
)
PRETRAIN = "--from-scratch --schedule joint --learning-rate 2e-3 --max-grad-norm 1 --steps"
TUNE = "--steps 500 --learning-rate 6e-4 --max-grad-norm 1 --seed 1"

# name → (starts from, arguments)
RUNS = {
    "base": ("random", f"{PRETRAIN} 2000 --tiers large=8"),
    "untrained": ("base", f"--steps 1 --learning-rate 0 --schedule joint --tiers {TIERS}"),
    "joint": ("base", f"{TUNE} --schedule joint --tiers {TIERS}"),
    "joint-distill": ("base", f"{TUNE} --schedule joint --distill 0.5 --tiers {TIERS}"),
    "stepwise": ("base", f"{TUNE} --schedule stepwise --tiers {TIERS}"),
    "top-only": ("base", f"{TUNE} --schedule joint --tiers large=8"),
    "shared-norm": ("base", f"{TUNE} --schedule joint --share-exit-norm --tiers {TIERS}"),
    "own-heads": ("base", f"{TUNE} --schedule joint --own-heads --tiers {TIERS}"),
    "lora": ("base", f"{TUNE} --schedule joint --trains lora --tiers {TIERS}"),
    "balanced": ("base", f"{TUNE} --schedule joint --balance gradient_norm --tiers {TIERS}"),
    "alone-small-base": ("random", f"{PRETRAIN} 2000 --tiers small=4"),
    "alone-small": ("alone-small-base", f"{TUNE} --schedule joint --tiers small=4"),
    "alone-medium-base": ("random", f"{PRETRAIN} 2000 --tiers medium=6"),
    "alone-medium": ("alone-medium-base", f"{TUNE} --schedule joint --tiers medium=6"),
    "first-step-base": ("random", f"{PRETRAIN} 2000 --tiers {TIERS}"),
    "first-step": ("first-step-base", f"{TUNE} --schedule joint --tiers {TIERS}"),
}


def make_random(corpus: Path, folder: Path) -> None:
    """A family folder with the shape and tokenizer of all runs, for them to start from."""
    tokenizer = Tokenizer(corpus / "tokenizer")
    tier = TierSpec("large", MODEL.num_layers)
    family = FamilySpec(MODEL, (tier,), "", (), "float32", tokenizer.end_token_ids, "random")
    write_model(folder, random_model(family, seed=0), corpus / "tokenizer")


def run(name: str, corpus: Path, runs: Path) -> None:
    start, arguments = RUNS[name]
    if (runs / name / "family.json").exists():
        return
    if start != "random":
        run(start, corpus, runs)
    print(f"== {name}", flush=True)
    command = [sys.executable, "-m", "mfs_trt", "precipitate", str(runs / start)]
    command += ["--data", str(corpus / "train.jsonl"), "--out", str(runs / name)]
    subprocess.run([*command, *COMMON.split(), *arguments.split()], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("runs", type=Path)
    parser.add_argument("names", nargs="*", help="All by default.")
    args = parser.parse_args()
    if not (args.runs / "random" / "family.json").exists():
        make_random(args.corpus, args.runs / "random")
    for name in args.names or RUNS:
        run(name, args.corpus, args.runs)


if __name__ == "__main__":
    main()
