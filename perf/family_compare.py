"""The table of `family/train.py`'s runs: held-out loss per tier, and the gap to models trained
alone.

Every run was evaluated on the same held-out sequences as it went on. A tier's gap is its loss over
that of an independent model of the same depth with as many steps and tokens, at the end and, as
curves, after every hundred steps and by the part of all tokens that trained the low tiers.
Usage: python perf/family_compare.py RUNS_FOLDER [--out FILE] [--plot PNG]
"""

import argparse
import json
from pathlib import Path
from typing import Any

from report import finish, show

TIERS = ("draft", "small", "medium", "large")
ALONE = {"small": "alone-small", "medium": "alone-medium", "large": "top-only"}
GOALS = {"small": 3.0, "medium": 3.0, "large": 1.0}  # %
PRECIPITATED = (  # from `base`, with as many steps as those alone are tuned
    "joint",
    "joint-distill",
    "stepwise",
    "balanced",
    "own-heads",
    "shared-norm",
    "lora",
)

# joint runs of as many steps in all, by the trainings that gave the low tiers their tokens
BY_SHARE = {
    "joint": ("joint",),
    "longer": ("longer",),
    "first-step": ("first-step-base", "first-step"),
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


def share_curve(runs: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Gaps at the end of all training, by the tokens that precipitation had of them."""
    return [
        {"run": name, "tokens": sum(runs[p]["tokens"] for p in parts), **runs[name]["gap_to_alone"]}
        for name, parts in BY_SHARE.items()
        if all(part in runs for part in parts)
    ]


def plot(runs: dict[str, dict[str, Any]], by_share: list[dict[str, Any]], file: Path) -> None:
    """A column per tier. Above: gap as tuning goes on, a line per run; below: by its share."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, len(ALONE), figsize=(12, 8))
    curves = {name: run["gap_curve"] for name, run in runs.items() if "gap_curve" in run}
    for row, lines in zip(axes, (curves, {"joint, by its share": by_share}), strict=True):
        for axis, tier in zip(row, ALONE, strict=True):
            for name, curve in lines.items():
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
    peers = {tier: runs[name] for tier, name in ALONE.items() if name in runs}
    alone = {tier: peer["held_out"][tier] for tier, peer in peers.items()}
    rows = []
    for name, run in runs.items():
        losses = [run["held_out"].get(tier, "-") for tier in TIERS]
        gaps = {
            tier: run["held_out"][tier] / alone[tier] - 1
            for tier in alone
            if tier in run["held_out"]
        }
        run["gap_to_alone"] = gaps
        if name in PRECIPITATED:
            run["gap_curve"] = gap_curve(run, peers)
        shown = ", ".join(f"{tier} {100 * gap:+.1f} %" for tier, gap in gaps.items())
        rows.append((name, run["tokens"], *losses, shown))
    show("held-out loss, nats per token", ["run", "tokens", *TIERS, "gap"], rows)
    by_share = share_curve(runs)
    if args.plot:
        plot(runs, by_share, args.plot)
    finish({"benchmark": "family", "runs": runs, "gap_by_share": by_share}, args.out)


if __name__ == "__main__":
    main()
