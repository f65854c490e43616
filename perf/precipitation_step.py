"""A training step of all tiers against Hugging Face's own of the same model and batch: time in
turns in one process, peak memory in a process each.

Three ways: `transformers` with its model's own loss, the top tier alone here, all tiers here. The
arithmetic of a further exit is measured as its head's own: forward and backward, with its loss.
Usage: python perf/precipitation_step.py FAMILY [--out FILE]
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from report import finish, show, spread

WAYS = ("transformers", "top tier", "all tiers")


def make_step(way: str, family_dir: Path, hf: Path, batch: int, length: int) -> Callable[[], None]:
    """One optimizer step on random tokens, bf16 autocast, AdamW over fp32 weights."""
    import torch

    from mfs_trt.precipitation.config import PrecipitationConfig
    from mfs_trt.precipitation.initial import starting_model
    from mfs_trt.precipitation.trainer import Trainer
    from mfs_trt.precipitation.world import World
    from mfs_trt.weights.store import WeightStore

    spec = WeightStore(family_dir).spec
    torch.manual_seed(0)
    tokens = torch.randint(0, spec.model.vocab_size, (batch, length))
    if way == "transformers":
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.1)

        def step() -> None:
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
            optimizer.zero_grad()

        return step

    class Fixed:
        """The same batch at every position."""

        def batch(self, position: int, count: int):
            return tokens, tokens.roll(-1, 1)

    tiers = spec.tiers if way == "all tiers" else spec.tiers[-1:]
    config = PrecipitationConfig(
        seq_length=length,
        batch_size=batch,
        micro_batch_size=batch,
        schedule="joint",
        learning_rate=1e-5,
        evaluate_every=10**6,
    )
    model = starting_model(WeightStore(family_dir), tiers, is_random=False, seed=0)
    trainer = Trainer(model, Fixed(), config, World(0, 1, torch.device("cpu")))
    return lambda: trainer.step() and None


def head_seconds(family_dir: Path, num_rows: int) -> float:
    """One LM head with its cross entropy, forward and backward, on `num_rows` rows."""
    import torch
    import torch.nn.functional as F

    from mfs_trt.weights.store import WeightStore

    model = WeightStore(family_dir).spec.model
    x = torch.randn(num_rows, model.hidden_size, requires_grad=True)
    weight = torch.randn(model.vocab_size, model.hidden_size, requires_grad=True)
    labels = torch.randint(0, model.vocab_size, (num_rows,))
    started = time.perf_counter()
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(F.linear(x, weight).float(), labels)
    loss.backward()
    return time.perf_counter() - started


def peak_nbytes(way: str, arguments: list[str]) -> tuple[int, int]:
    """Resident memory before the first step, and at its highest, in a process of its own."""
    command = [sys.executable, __file__, *arguments, "--only", way]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return tuple(json.loads(lines[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("family", type=Path)
    parser.add_argument("--hf", type=Path, help="the top tier as a Hugging Face folder")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--only", choices=WAYS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    sizes = args.batch, args.length
    if args.only:
        step = make_step(args.only, args.family, args.hf, *sizes)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        for _ in range(2):
            step()
        print(json.dumps([before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024]))
        return
    with tempfile.TemporaryDirectory() as folder:
        hf = args.hf or Path(folder) / "hf"
        if args.hf is None:
            export = ["export", str(args.family), "--format", "hf", "--out", str(hf)]
            subprocess.run([sys.executable, "-m", "mfs_trt", *export], check=True)
        passed = [str(args.family), "--hf", str(hf)]
        passed += ["--batch", str(args.batch), "--length", str(args.length)]
        memory = {way: peak_nbytes(way, passed) for way in WAYS}
        steps = {way: make_step(way, args.family, hf, *sizes) for way in WAYS}
        times: dict[str, list[float]] = {way: [] for way in WAYS}
        heads = []
        for round_ in range(args.rounds + 1):
            for way, step in steps.items():
                started = time.perf_counter()
                step()
                if round_:  # the first one warms up
                    times[way].append(time.perf_counter() - started)
            if round_:
                heads.append(head_seconds(args.family, args.batch * args.length))
    from mfs_trt.weights.store import WeightStore

    spec = WeightStore(args.family).spec
    num_more = len(spec.tiers) - 1
    first = times["transformers"]
    allowed = [1.15 * (a + num_more * h) / a for a, h in zip(first, heads, strict=True)]
    result: dict[str, Any] = {
        "benchmark": "precipitation_step",
        "tiers": {t.name: t.exit_layer for t in spec.tiers},
        "batch": args.batch,
        "length": args.length,
        "logits_mb_of_one_exit": args.batch * args.length * spec.model.vocab_size * 4 / 1e6,
        "head_s": spread(heads),
        "allowed_ratio": spread(allowed),
    }
    rows = []
    for way in WAYS:
        ratios = spread([b / a for a, b in zip(first, times[way], strict=True)])
        before, peak = memory[way]
        result[way] = {"seconds": spread(times[way]), "ratio": ratios,
                       "loaded_mb": before / 1e6, "peak_mb": peak / 1e6}  # fmt: skip
        rows.append((way, spread(times[way])["median"], ratios["median"], peak / 1e6))
    show("one training step", ["way", "s", "to transformers", "peak MB"], rows)
    finish(result, args.out)


if __name__ == "__main__":
    main()
