"""The table of `family/train.py`'s runs: held-out loss per tier, and the gap to models trained
alone.

Every run was evaluated on the same held-out sequences when it ended. A tier's gap is its loss over
that of an independent model of the same depth with as many steps and tokens. Usage: python
perf/family_compare.py RUNS_FOLDER [--out FILE]
"""

import argparse
import json
from pathlib import Path
from typing import Any

from report import finish, show

TIERS = ("draft", "small", "medium", "large")
ALONE = {"small": "alone-small", "medium": "alone-medium", "large": "top-only"}


def read_run(folder: Path) -> dict[str, Any]:
    """Last evaluation, tokens and mean speed of one run."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    done = sorted(p.parent.name for p in args.runs.glob("*/family.json"))
    runs = {n: read_run(args.runs / f"{n}.training") for n in done if n != "random"}
    alone = {tier: runs[name]["held_out"][tier] for tier, name in ALONE.items() if name in runs}
    rows = []
    for name, run in runs.items():
        losses = [run["held_out"].get(tier, "-") for tier in TIERS]
        gaps = {
            tier: run["held_out"][tier] / alone[tier] - 1
            for tier in alone
            if tier in run["held_out"]
        }
        run["gap_to_alone"] = gaps
        shown = ", ".join(f"{tier} {100 * gap:+.1f} %" for tier, gap in gaps.items())
        rows.append((name, run["tokens"], *losses, shown))
    show("held-out loss, nats per token", ["run", "tokens", *TIERS, "gap"], rows)
    finish({"benchmark": "family", "runs": runs}, args.out)


if __name__ == "__main__":
    main()
