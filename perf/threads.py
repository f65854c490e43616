"""Decode steps of the reference engine by thread count and waiting, alone and beside a busy
neighbour.

Each setting runs in a process of its own, since OpenMP reads its waiting policy once. Settings
alternate, alone and beside a neighbour: one process that keeps two threads' worth of OpenMP work
going, as a second server would. Usage: python perf/threads.py FAMILY_OR_ENGINE [--rounds 3] [--out
FILE]
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from decoding import Decoding
from report import finish, show, spread

SETTINGS = {
    "2 threads, spinning": {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "ACTIVE"},
    "2 threads, library default": {"OMP_NUM_THREADS": "2"},
    "2 threads, passive": {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"},
    "1 thread": {"OMP_NUM_THREADS": "1"},
}
NEIGHBOUR = "import torch; torch.set_num_threads(2); x = torch.randn(700, 700)\nwhile True: x @ x"


def measure(engine_dir: str, batch: int, num_steps: int) -> None:
    """In the child: print milliseconds of each decode step."""
    from mfs_trt.serving.core import load_core

    decoding = Decoding(load_core(engine_dir), [None] * batch)
    print(json.dumps([decoding.step_ms()[0] for _ in range(num_steps)]))


def run_setting(environment: dict[str, str], args: argparse.Namespace) -> list[float]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_", "KMP_"))}
    command = [sys.executable, __file__, args.engine, "--measure", f"--batch={args.batch}"]
    done = subprocess.run(
        command, env={**clean, **environment}, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        measure(args.engine, args.batch, args.steps)
        return
    times: dict[tuple[str, str], list[float]] = {}
    for _ in range(args.rounds):
        for name, environment in SETTINGS.items():
            times.setdefault((name, "alone"), []).extend(run_setting(environment, args))
        neighbour = subprocess.Popen(
            [sys.executable, "-c", NEIGHBOUR], env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
        )
        try:
            for name, environment in SETTINGS.items():
                times.setdefault((name, "busy"), []).extend(run_setting(environment, args))
        finally:
            neighbour.kill()
            neighbour.wait()
    figures = {f"{name}, {where}": spread(values) for (name, where), values in times.items()}
    best = {
        where: min(f["median"] for name, f in figures.items() if name.endswith(where))
        for where in ("alone", "busy")
    }
    rows = [
        (name, f["median"], f["p10"], f["p90"], f["median"] / best[name.rsplit(", ", 1)[1]])
        for name, f in figures.items()
    ]
    columns = ["setting", "ms/step", "p10", "p90", "over the best there"]
    show(f"decode step, batch {args.batch}", columns, rows)
    result = {"benchmark": "threads", "batch": args.batch, "ms_per_step": figures}
    finish(result, args.out)


if __name__ == "__main__":
    main()
