"""One of `train.py`'s runs as the family that the package ships: bfloat16, with its recipe beside
it.

Usage: python perf/family/ship.py RUNS_FOLDER RUN
"""

import argparse
import json
import shutil
from pathlib import Path

import torch
from train import COMMON, RUNS

from mfs_trt.checkpoint.hf import copy_tokenizer
from mfs_trt.weights.store import WeightStore
from mfs_trt.weights.writer import TensorEntry, write_family

OUT = Path(__file__).resolve().parents[2] / "mfs_trt" / "families" / "prose"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path)
    parser.add_argument("name")
    args = parser.parse_args()
    store = WeightStore(args.runs / args.name)
    spec = store.spec
    entries = [
        TensorEntry(name, shape, "bfloat16", lambda name=name: store.get(name).to(torch.bfloat16))
        for name, shape in spec.tensor_shapes().items()
    ]
    write_family(
        OUT,
        spec.model,
        spec.tiers,
        "bfloat16",
        entries,
        end_token_ids=spec.end_token_ids,
        source="public-domain prose, pretrained and precipitated by mfs-trt",
        write_tokenizer=lambda folder: copy_tokenizer(store.folder, folder),
        force=True,
    )
    steps = {}
    run = args.name
    while run != "random":
        start, arguments = RUNS[run]
        log = args.runs / f"{run}.training" / "metrics.jsonl"
        last = json.loads(log.read_text(encoding="utf-8").splitlines()[-1])
        steps[run] = {
            "from": start,
            "arguments": f"{COMMON} {arguments}",
            "trained_tokens": last["num_tokens"],
            "held_out_loss": last["held_out"],
        }
        shutil.copy(log, OUT / f"{run}.metrics.jsonl")
        run = start
    recipe = {"corpus": "perf/family/corpus.py", "runs": dict(reversed(steps.items()))}
    (OUT / "recipe.json").write_text(json.dumps(recipe, indent=1) + "\n", encoding="utf-8")
    print(f"{OUT}: {sum(f.stat().st_size for f in OUT.iterdir()) / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
