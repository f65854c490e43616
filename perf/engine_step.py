"""Decode steps of the compiled engine against OpenVINO GenAI's own `step()`, in turns, on one
machine.

Both stay loaded in processes of their own and decode the same number of requests with the same
prompt lengths; rounds alternate. `loop` is our whole step, schedule to sampled tokens; `engine` its
part in `Engine.execute`. The floor is what the machine's measured read bandwidth allows for the
bytes of weights and KV, or its measured matrix rate for the arithmetic, whichever is more; both
rates are measured in every round. Usage: python perf/engine_step.py ENGINE [--peer-python PYTHON
--peer-model FOLDER] [--out FILE]
"""

import argparse
import json
import mmap
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from decoding import PROMPT_TOKENS, Decoding
from report import finish, show, spread

from mfs_trt.engine.threads import wait_passively

SHOWN = (
    "engine_ms",
    "loop_ms",
    "genai_step_ms",
    "engine_over_genai",
    "engine_over_floor",
    "loop_over_engine",
)


class Peer:
    """A child process that measures on demand."""

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        while self._process.stdout.readline().strip() != "ready":
            if self._process.poll() is not None:
                raise RuntimeError(f"{' '.join(command)} ended with {self._process.returncode}")

    def measure(self, batch: int, num_steps: int) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{batch} {num_steps}\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def serve_measurements(engine_dir: str) -> None:
    """In the child: our own side of the protocol; answers {"loop": […], "engine": […]}."""
    from mfs_trt.serving.core import load_core

    core = load_core(engine_dir)
    print("ready", flush=True)
    for line in sys.stdin:
        batch, num_steps = map(int, line.split())
        decoding = Decoding(core, [None] * batch)
        loop, engine = zip(*(decoding.step_ms() for _ in range(num_steps)), strict=True)
        decoding.close()
        print(json.dumps({"loop": loop, "engine": engine}), flush=True)


def reading_memory() -> Any:
    """A gigabyte that no cache holds, on huge pages where there are any."""
    import torch

    memory = mmap.mmap(-1, 1 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.float32).fill_(0)


def read_rate(data: Any) -> float:
    """Bytes per second of reading it, best of several."""
    times = []
    for _ in range(5):
        started = time.perf_counter()
        data.sum()
        times.append(time.perf_counter() - started)
    return data.nbytes / min(times)


def matrix_rate(num_rows: int, dtype: str) -> float:
    """Operations per second of a product of `num_rows` rows with a matrix in cache, best of
    several, in float32 or in `dtype`, whichever is faster.

    A product of few rows cannot use the machine as one of thousands does, so the floor takes the
    rate at the step's own number of rows.
    """
    import torch

    from mfs_trt.dtypes import torch_dtype

    times = []
    for kind in {torch.float32, torch_dtype(dtype)}:
        a, b = torch.randn(num_rows, 576).to(kind), torch.randn(1536, 576).to(kind)
        for _ in range(20):
            started = time.perf_counter()
            for _ in range(20):
                torch.nn.functional.linear(a, b)
            times.append(time.perf_counter() - started)
    return 20 * 2 * num_rows * 576 * 1536 / min(times)


def floor_ms(
    folder: Path, manifest: Any, batch: int, bytes_per_s: float, flops_per_s: float
) -> float:
    """The least time that the measured rates allow a top-tier decode step."""
    from mfs_trt.family.costs import tier_costs

    kv_itemsize = {"float32": 4, "bfloat16": 2, "uint8": 1}[manifest.kv_dtype or manifest.dtype]
    top = tier_costs(manifest.load_family(), kv_itemsize)[-1]
    weights = sum(
        (folder / name).stat().st_size
        for plan in manifest.plans
        for name in plan.files
        if name.endswith(".bin")
    )
    kv = batch * PROMPT_TOKENS * top.total_kv_nbytes_per_token
    reading = (weights + kv) / bytes_per_s
    return 1000 * max(reading, batch * top.flops_per_token / flops_per_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine")
    parser.add_argument("--peer-python")
    parser.add_argument("--peer-model")
    parser.add_argument("--precision", default="f32", help="f32 or bf16, for the peer")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    wait_passively()
    if args.serve:
        serve_measurements(args.engine)
        return
    from mfs_trt.engine.manifest import EngineManifest

    manifest = EngineManifest.load(args.engine)
    memory = reading_memory()
    ours = Peer([sys.executable, __file__, args.engine, "--serve"])
    peer = None
    if args.peer_python:
        script = str(Path(__file__).with_name("genai_peer.py"))
        peer = Peer([args.peer_python, script, args.peer_model, args.precision, str(PROMPT_TOKENS)])
    result: dict[str, Any] = {"benchmark": "engine_step", "engine": Path(args.engine).name}
    rows = []
    for batch in args.batches:
        figures: dict[str, list[float]] = defaultdict(list)
        for _ in range(args.rounds):
            mine = ours.measure(batch, args.steps)
            figures["engine_ms"] += mine["engine"]
            figures["loop_ms"] += mine["loop"]
            engine = float(np.median(mine["engine"]))
            figures["loop_over_engine"].append(float(np.median(mine["loop"])) / engine)
            figures["read_bytes_per_s"].append(read_rate(memory))
            figures["flops_per_s"].append(matrix_rate(batch, manifest.dtype))
            rates = figures["read_bytes_per_s"][-1], figures["flops_per_s"][-1]
            figures["floor_ms"].append(floor_ms(Path(args.engine), manifest, batch, *rates))
            figures["engine_over_floor"].append(engine / figures["floor_ms"][-1])
            if peer is not None:
                other = peer.measure(batch, args.steps)
                figures["genai_step_ms"] += other
                figures["engine_over_genai"].append(engine / float(np.median(other)))
        result[f"batch {batch}"] = {name: spread(values) for name, values in figures.items()}
        rows.append(
            (batch, *(float(np.median(figures[c])) if c in figures else "-" for c in SHOWN))
        )
    ours.close()
    if peer is not None:
        peer.close()
    show("decode steps, medians of rounds", ["batch", *SHOWN], rows)
    finish(result, args.out)


if __name__ == "__main__":
    main()
