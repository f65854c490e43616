"""The table of `family/train.py`'s runs: held-out loss per tier, and the gap to models trained
alone.

Every run was evaluated on the same held-out sequences as it went on. A tier's gap is its loss over
that of an independent model of the same depth with as many steps and tokens, at the end and, as a
curve, after every hundred steps.
Usage: python perf/family_compare.py RUNS_FOLDER [--out FILE] [--plot PNG]
"""

import argparse
import json
from pathlib import Path
from typing import Any

from report import finish, show

TIERS = ("draft", "small", "medium", "large")
ALONE = {"small": "alone-small", "medium": "alone-medium", "large": "top-only"}
ALONE_BASES = {"small": "alone-small-base", "medium": "alone-medium-base", "large": "base"}
GOALS = {"small": 3.0, "medium": 3.0, "large": 1.0}  # %
# runs → the models of equal depth, alone, that are as far
PEERS = {
    "joint": ALONE,
    "joint-distill": ALONE,
    "stepwise": ALONE,
    "balanced": ALONE,
    "own-heads": ALONE,
    "shared-norm": ALONE,
    "lora": ALONE,
    "first-step": ALONE,
    "first-step-base": ALONE_BASES,
}


def read_run(folder: Path) -> dict[str, Any]:
    """Steps, tokens, last evaluation and all evaluations of one run."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    reports = [json.loads(line) for line in lines]
    last = reports[-1]
    return {
        "steps": last["step"],
        "tokens": last["num_tokens"],
        "held_out": last["held_out"],
        "curve": [
            {"step": r["step"], "tokens": r["num_tokens"], **r["held_out"]}
            for r in reports
            if r["held_out"]
        ],
    }


def gap_curve(run: dict[str, Any], alone: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Gaps after the same number of tuning steps, and so tokens, of both."""
    curve = []
    for point in run["curve"]:
        gaps = {
            tier: point[tier] / other[tier] - 1
            for tier, peer in alone.items()
            for other in peer["curve"]
            if tier in point and other["step"] == point["step"]
        }
        if gaps:
            curve.append({"tokens": point["tokens"], **gaps})
    return curve


def plot(runs: dict[str, dict[str, Any]], file: Path) -> None:
    """A column per tier: gap against tokens. Above while tuning, below from the first step on."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, len(ALONE), figsize=(12, 8))
    for row, peers in zip(axes, (ALONE, ALONE_BASES), strict=True):
        for axis, tier in zip(row, peers, strict=True):
            for name in (n for n in PEERS if PEERS[n] is peers and n in runs):
                curve = runs[name]["gap_curve"]
                points = [(p["tokens"], 100 * p[tier]) for p in curve if tier in p]
                if points:
                    axis.plot(*zip(*points, strict=True), marker="o", label=name)
            axis.set(title=tier, xlabel="precipitation tokens", ylabel="loss over alone, %")
            axis.axhline(GOALS[tier], color="grey", linestyle=":")
        row[0].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(file, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    done = sorted(p.parent.name for p in args.runs.glob("*/family.json"))
    runs = {n: read_run(args.runs / f"{n}.training") for n in done if n != "random"}
    alone = {t: runs[name]["held_out"][t] for t, name in ALONE.items() if name in runs}
    rows = []
    for name, run in runs.items():
        losses = [run["held_out"].get(tier, "-") for tier in TIERS]
        gaps = {
            tier: run["held_out"][tier] / alone[tier] - 1
            for tier in alone
            if tier in run["held_out"]
        }
        run["gap_to_alone"] = gaps
        if name in PEERS:
            peers = {t: runs[peer] for t, peer in PEERS[name].items() if peer in runs}
            run["gap_curve"] = gap_curve(run, peers)
        shown = ", ".join(f"{tier} {100 * gap:+.1f} %" for tier, gap in gaps.items())
        rows.append((name, run["tokens"], *losses, shown))
    show("held-out loss, nats per token", ["run", "tokens", *TIERS, "gap"], rows)
    if args.plot:
        plot(runs, args.plot)
    finish({"benchmark": "family", "runs": runs}, args.out)


if __name__ == "__main__":
    main()
