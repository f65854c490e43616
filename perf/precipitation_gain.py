"""What a precipitation changed: loss of every tier and acceptance between tiers, before and after.

Both families are measured on the sequences that the training kept for evaluation and never saw.
Usage: python perf/precipitation_gain.py BEFORE AFTER --eval-sequences N [--out FILE]; AFTER is what
`mfs-trt precipitate … --eval-sequences N --out AFTER` wrote, with `AFTER.training` beside it.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from report import finish, show

from mfs_trt.evaluation.evaluation import evaluate_model
from mfs_trt.model.transformer import NestedModel
from mfs_trt.precipitation.packing import PackedTokens
from mfs_trt.weights.store import WeightStore


def held_out(training: Path, seq_length: int, num_sequences: int, end_token_id: int):
    (tokens,) = training.glob("*.tokens.npy")
    packed = PackedTokens.open(tokens, seq_length, seed=0, end_token_id=end_token_id)
    return packed.split(num_sequences)[1]


def measure(family: Path, sequences: PackedTokens) -> dict[str, float]:
    model = NestedModel.from_store(WeightStore(family), sequences.seq_length)
    return evaluate_model(model, sequences, batch_size=2).metrics()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--eval-sequences", type=int, required=True)
    parser.add_argument("--seq-length", type=int, default=512)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    spec = WeightStore(args.after).spec
    training = args.after.with_name(f"{args.after.name}.training")
    sequences = held_out(training, args.seq_length, args.eval_sequences, spec.end_token_ids[0])
    before, after = (measure(family, sequences) for family in (args.before, args.after))
    lines = (training / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [json.loads(line) for line in lines]
    result: dict[str, Any] = {
        "benchmark": "precipitation_gain",
        "family": args.before.name,
        "tiers": {tier.name: tier.exit_layer for tier in spec.tiers},
        "steps": steps[-1]["step"],
        "trained_tokens": steps[-1]["num_tokens"],
        "held_out_tokens": sequences.num_sequences * args.seq_length,
        "before": before,
        "after": after,
        "curve": [{"step": s["step"], **s["held_out"]} for s in steps if s["held_out"]],
    }
    rows = [
        (name, before[name], after[name], f"{100 * (after[name] / before[name] - 1):+.1f} %")
        for name in before
    ]
    show(f"after {steps[-1]['step']} steps", ["metric", "before", "after", "change"], rows)
    finish(result, args.out)


if __name__ == "__main__":
    main()
