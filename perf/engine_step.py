"""Decode steps of the compiled engine against OpenVINO GenAI's own `step()`, in turns, on one
machine.

Both stay loaded in processes of their own and decode the same number of requests with the same
prompt lengths; rounds alternate. `loop` is our whole step, schedule to sampled tokens; `engine` its
part in `Engine.execute`. The floor is what the machine's measured read bandwidth allows for the
bytes of weights and KV, or its measured matrix rate for the arithmetic, whichever is more. Usage:
python perf/engine_step.py ENGINE [--peer-python PYTHON --peer-model FOLDER] [--out FILE]
"""

import argparse
import json
import mmap
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from report import finish, show, spread

from mfs_trt.engine.threads import wait_passively

PROMPT_TOKENS = 64


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
    from mfs_trt.request import PromptRequest
    from mfs_trt.sampling_params import SamplingParams
    from mfs_trt.serving.core import load_core

    core = load_core(engine_dir)
    execute = core.engine.execute
    engine_times: list[float] = []

    def timed(step):
        started = time.perf_counter()
        output = execute(step)
        engine_times.append(1000 * (time.perf_counter() - started))
        return output

    core.engine.execute = timed
    print("ready", flush=True)
    for line in sys.stdin:
        batch, num_steps = map(int, line.split())
        params = SamplingParams(max_tokens=num_steps + 3, ignore_eos=True)
        for i in range(batch):
            ids = list(range(5 + i, 5 + i + PROMPT_TOKENS))
            for sequence in core.make_requests(PromptRequest(f"r{i}", params, token_ids=ids)):
                core.add(sequence)
        while any(r.num_output_tokens < 2 for r in core.scheduler.requests.values()):
            core.step()
        engine_times.clear()
        loop_times = []
        for _ in range(num_steps):
            started = time.perf_counter()
            core.step()
            loop_times.append(1000 * (time.perf_counter() - started))
        measured = {"loop": loop_times, "engine": list(engine_times)}
        while core.has_requests:
            core.step()
        print(json.dumps(measured), flush=True)


def read_rate() -> float:
    """Bytes per second of reading memory that no cache holds, on huge pages where there are any,
    best of several.
    """
    import torch

    memory = mmap.mmap(-1, 1 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    data = torch.frombuffer(memory, dtype=torch.float32).fill_(0)
    times = []
    for _ in range(8):
        started = time.perf_counter()
        data.sum()
        times.append(time.perf_counter() - started)
    return data.nbytes / min(times)


def matrix_rate(num_rows: int) -> float:
    """fp32 operations per second of a product of `num_rows` rows with a matrix in cache, best of
    several.

    A product of few rows cannot use the machine as one of thousands does, so the floor takes the
    rate at the step's own number of rows.
    """
    import torch

    a, b = torch.randn(num_rows, 576), torch.randn(1536, 576)
    times = []
    for _ in range(50):
        started = time.perf_counter()
        for _ in range(20):
            torch.nn.functional.linear(a, b)
        times.append(time.perf_counter() - started)
    return 20 * 2 * num_rows * 576 * 1536 / min(times)


def floor_ms(engine_dir: str, batch: int, bytes_per_s: float, flops_per_s: float) -> float:
    """The least time that the measured rates allow a top-tier decode step."""
    from mfs_trt.engine.manifest import EngineManifest
    from mfs_trt.family.costs import tier_costs

    manifest = EngineManifest.load(engine_dir)
    family = manifest.load_family()
    top = tier_costs(family, kv_itemsize=4)[-1]
    weights = sum(
        (Path(engine_dir) / name).stat().st_size
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
    bytes_per_s = read_rate()
    ours = Peer([sys.executable, __file__, args.engine, "--serve"])
    peer = None
    if args.peer_python:
        script = str(Path(__file__).with_name("genai_peer.py"))
        peer = Peer([args.peer_python, script, args.peer_model, args.precision, str(PROMPT_TOKENS)])
    result: dict[str, Any] = {"benchmark": "engine_step", "engine": Path(args.engine).name}
    rows = []
    for batch in args.batches:
        loop: list[float] = []
        engine: list[float] = []
        theirs: list[float] = []
        ratios = []
        for _ in range(args.rounds):
            mine = ours.measure(batch, args.steps)
            loop += mine["loop"]
            engine += mine["engine"]
            if peer is not None:
                other = peer.measure(batch, args.steps)
                theirs += other
                ratios.append(float(np.median(mine["engine"]) / np.median(other)))
        flops_per_s = matrix_rate(batch)
        floor = floor_ms(args.engine, batch, bytes_per_s, flops_per_s)
        figures = {"engine_ms": spread(engine), "loop_ms": spread(loop), "floor_ms": floor}
        figures |= {"read_bytes_per_s": bytes_per_s, "fp32_flops_per_s": flops_per_s}
        if peer is not None:
            figures |= {"genai_step_ms": spread(theirs), "engine_over_genai": spread(ratios)}
        result[f"batch {batch}"] = figures
        rows.append(
            (
                batch,
                figures["engine_ms"]["median"],
                figures["loop_ms"]["median"],
                figures.get("genai_step_ms", {}).get("median", "-"),
                figures.get("engine_over_genai", {}).get("median", "-"),
                figures["engine_ms"]["median"] / floor,
                figures["loop_ms"]["median"] / figures["engine_ms"]["median"],
            )
        )
    ours.close()
    if peer is not None:
        peer.close()
    columns = [
        "batch",
        "engine ms",
        "loop ms",
        "GenAI ms",
        "engine/GenAI",
        "engine/floor",
        "loop/engine",
    ]
    show("decode steps, medians", columns, rows)
    finish(result, args.out)


if __name__ == "__main__":
    main()
