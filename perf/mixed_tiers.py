"""Tier-level batching: one step with rows of every tier against separate steps, one engine per
tier.

Each tier decodes ROWS requests. Fused: one engine, one step with all of them. Separate: an engine
(weights and arena of its own) per tier, each running its tier's rows alone. Alternating in one
process. The share that sharing can give at most is computed from bytes read (weights once instead
of once per tier) and from arithmetic (the same for both). Usage: python perf/mixed_tiers.py ENGINE
[--rows 8] [--out FILE]
"""

import argparse
from pathlib import Path

import numpy as np
from decoding import Decoding
from report import finish, show, spread

from mfs_trt.engine.threads import wait_passively


def shares(engine_dir: str) -> dict[str, float]:
    """Separate over fused, if only bytes of weights counted, and if only arithmetic did."""
    from mfs_trt.engine.manifest import EngineManifest
    from mfs_trt.family.costs import tier_costs

    family = EngineManifest.load(engine_dir).load_family()
    costs = tier_costs(family, kv_itemsize=4)
    separate = sum(cost.standalone_parameters for cost in costs)
    return {"by_bytes": separate / costs[-1].total_parameters, "by_arithmetic": 1.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    wait_passively()
    from mfs_trt.engine.manifest import EngineManifest
    from mfs_trt.serving.core import load_core

    manifest = EngineManifest.load(args.engine)
    names = [t.name for t in manifest.load_family().tiers]
    result = {"benchmark": "mixed_tiers", "dtype": manifest.dtype}
    result |= {"weights": manifest.weight_format or manifest.dtype}
    rows = []
    for count in args.rows:
        fused = Decoding(load_core(args.engine), names * count)
        separate = [Decoding(load_core(args.engine), [name] * count) for name in names]
        ratios, fused_ms, separate_ms = [], [], []
        for _ in range(args.rounds):
            fused_ms.append(fused.step_ms()[1])
            separate_ms.append(sum(server.step_ms()[1] for server in separate))
            ratios.append(separate_ms[-1] / fused_ms[-1])
        limits = shares(args.engine)
        figures = {"fused_ms": spread(fused_ms), "separate_ms": spread(separate_ms)}
        result[f"{count} rows a tier"] = {**figures, "ratio": spread(ratios), "limits": limits}
        rows.append(
            (
                count,
                float(np.median(fused_ms)),
                float(np.median(separate_ms)),
                float(np.median(ratios)),
                limits["by_bytes"],
                limits["by_arithmetic"],
            )
        )
    columns = ["rows a tier", "fused ms", "separate ms", "ratio", "if bytes count", "if arithmetic"]
    show("one step of all tiers against one engine per tier", columns, rows)
    finish(result, args.out)


if __name__ == "__main__":
    main()
