"""Bandwidth of each operator's kernels at decode, against a copy's on the same GPU.

Decode reads every key, value and delta once: the least time is their bytes at the bandwidth of a
copy, and `share_of_copy` is that time over the measured one. Caches and deltas are larger than the
GPU's cache.
Usage: PYTHONPATH=perf python perf/gpu/kernels.py [--out FILE]; `--smoke` runs it on the CPU
with tiny sizes, which checks the script and measures nothing.
Status: tried with --smoke only; it has not run on a GPU.
"""

import argparse
import importlib.metadata
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from report import finish, show, spread

Step = Callable[[], object]


@dataclass(frozen=True)
class Machine:
    """Where it is measured, and how much memory a benchmark may take."""

    device: str
    memory_nbytes: int
    num_processors: int
    repeats: int

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device, dtype=torch.float16)

    def index(self, values) -> torch.Tensor:
        return torch.as_tensor(values, dtype=torch.int32, device=self.device)

    def time_ms(self, step: Step) -> list[float]:
        """Milliseconds of each repeat, after two that are not counted."""
        for _ in range(2):
            step()
        if self.device == "cpu":
            return [_seconds(step) * 1000 for _ in range(self.repeats)]
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(self.repeats + 1)]
        marks[0].record()
        for mark in marks[1:]:
            step()
            mark.record()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) for a, b in zip(marks, marks[1:], strict=False)]


def copy(machine: Machine) -> tuple[Step, int]:
    source = machine.random(machine.memory_nbytes // 4)
    target = torch.empty_like(source)
    return lambda: target.copy_(source), 2 * source.nbytes


def paged_attention(
    machine: Machine, num_reqs: int, length: int, heads: int = 32, kv_heads: int = 8
) -> tuple[Step, int]:
    """One new token of each of `num_reqs` requests of `length` tokens; 128 numbers a head."""
    from mfs_trt.plugins.triton_kernels import paged_attention as kernels

    head_dim, block_size = 128, 32
    num_blocks = -(-length // block_size)
    frames = 1 + torch.randperm(num_reqs * num_blocks)
    shape = (num_reqs * num_blocks + 1, kv_heads, block_size, head_dim)
    caches = (machine.random(*shape), machine.random(*shape))
    tables = machine.index(frames.reshape(num_reqs, num_blocks, 1))
    starts, lengths = machine.index(range(num_reqs + 1)), machine.index([length] * num_reqs)
    query = machine.random(num_reqs, heads, head_dim)
    num_splits = kernels.choose_num_splits(num_reqs * kv_heads, length, machine.num_processors)

    def step() -> object:
        return kernels.paged_attention(
            query, *caches, tables, starts, lengths, head_dim**-0.5, num_splits=num_splits
        )

    return step, 2 * num_reqs * length * kv_heads * head_dim * 2


def variant_delta(machine: Machine, num_reqs: int, rank: int) -> tuple[Step, int]:
    """One row of each of `num_reqs` variants, another set of deltas in each repeat."""
    from mfs_trt.plugins.triton_kernels.variant_delta import variant_delta as launch

    size = 5120 if machine.device == "cuda" else 128
    nbytes = 2 * num_reqs * size * rank * 2
    num_sets = max(2, min(64, machine.memory_nbytes // 2 // nbytes))
    deltas = [
        (machine.random(num_reqs, size, rank), machine.random(num_reqs, rank, size))
        for _ in range(num_sets)
    ]
    x, y = machine.random(num_reqs, size), machine.random(num_reqs, size)
    starts, variants = machine.index(range(num_reqs + 1)), machine.index(range(1, num_reqs + 1))
    turn = iter(range(sys.maxsize))

    def step() -> object:
        return launch(y, x, *deltas[next(turn) % num_sets], starts, variants)

    return step, nbytes


def kv_write(machine: Machine, num_rows: int) -> tuple[Step, int]:
    from mfs_trt.plugins.triton_kernels.kv_write import kv_write as launch

    kv_heads, head_dim, block_size = 8, 128, 32
    shape = (2 * num_rows // block_size + 2, kv_heads, block_size, head_dim)
    caches = (machine.random(*shape), machine.random(*shape))
    rows = [machine.random(num_rows, kv_heads, head_dim) for _ in range(2)]
    slots = machine.index(torch.randperm(shape[0] * block_size)[:num_rows, None])
    return lambda: launch(*rows, slots, *caches), 4 * rows[0].nbytes


def tier_exit(machine: Machine, num_rows: int) -> tuple[Step, int]:
    from mfs_trt.plugins.triton_kernels.tier_exit import tier_exit as launch

    hidden, gains = machine.random(num_rows, 5120), machine.random(3, 5120)
    rows, tiers = machine.index(range(num_rows)), machine.index([i % 3 for i in range(num_rows)])
    return lambda: launch(hidden, rows, tiers, gains, 1e-5), 2 * hidden.nbytes


# operator → its cases: name → function of the machine.
BENCHMARKS: dict[str, dict[str, Callable[[Machine], tuple[Step, int]]]] = {
    "paged_attention": {
        "64 requests of 4096": lambda m: paged_attention(m, 64, 4096),
        "8 requests of 32768": lambda m: paged_attention(m, 8, 32768),
        "1 request of 32768": lambda m: paged_attention(m, 1, 32768),
        "64 requests of 2048, 40 heads": lambda m: paged_attention(m, 64, 2048, 40, 40),
    },
    "variant_delta": {
        "32 variants of rank 16": lambda m: variant_delta(m, 32, 16),
        "32 variants of rank 64": lambda m: variant_delta(m, 32, 64),
        "4 variants of rank 64": lambda m: variant_delta(m, 4, 64),
    },
    "kv_write": {"8192 rows": lambda m: kv_write(m, 8192)},
    "tier_exit": {"8192 rows": lambda m: tier_exit(m, 8192)},
}
SMOKE: dict[str, dict[str, Callable[[Machine], tuple[Step, int]]]] = {
    "paged_attention": {"2 requests of 40": lambda m: paged_attention(m, 2, 40, 2, 1)},
    "variant_delta": {"2 variants of rank 4": lambda m: variant_delta(m, 2, 4)},
    "kv_write": {"3 rows": lambda m: kv_write(m, 3)},
    "tier_exit": {"3 rows": lambda m: tier_exit(m, 3)},
}


def measure(machine: Machine, benchmarks: dict[str, Any]) -> dict[str, Any]:
    """Operator → case → figures; a case that does not fit the GPU says so instead."""
    step, nbytes = copy(machine)
    copying = machine.time_ms(step)
    copy_rate = nbytes / spread(copying)["median"] * 1000
    result: dict[str, Any] = {"copy_bytes_per_s": copy_rate}
    rows = []
    for operator, cases in benchmarks.items():
        figures = result[operator] = {}
        for name, prepare in cases.items():
            try:
                step, nbytes = prepare(machine)
                times = machine.time_ms(step)
            except torch.OutOfMemoryError as error:
                figures[name] = {"left_out": str(error).splitlines()[0]}
                continue
            rate = nbytes / spread(times)["median"] * 1000
            figures[name] = {
                "ms": spread(times),
                "bytes_per_s": rate,
                "share_of_copy": rate / copy_rate,
            }
            rows.append((operator, name, spread(times)["median"], rate / 1e9, rate / copy_rate))
    show("decode", ["operator", "case", "ms", "GB/s", "of a copy"], rows)
    return result


def _seconds(step: Step) -> float:
    started = time.perf_counter()
    step()
    return time.perf_counter() - started


def _gpu() -> tuple[Machine, dict[str, Any]]:
    properties = torch.cuda.get_device_properties(0)
    free, _ = torch.cuda.mem_get_info()
    machine = Machine("cuda", min(8 << 30, free // 2), properties.multi_processor_count, 50)
    about = {
        "gpu": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "memory_nbytes": properties.total_memory,
        "cuda": torch.version.cuda,
    }
    return machine, about


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    about: dict[str, Any] = {}
    if args.smoke:
        os.environ["TRITON_INTERPRET"] = "1"
        machine, benchmarks = Machine("cpu", 1 << 20, 1, 2), SMOKE
    elif torch.cuda.is_available():
        (machine, about), benchmarks = _gpu(), BENCHMARKS
    else:
        sys.exit(f"expected an NVIDIA GPU that torch can use; torch {torch.__version__} sees none")
    result: dict[str, Any] = {"benchmark": "gpu_kernels", **about}
    result["versions"] = {name: importlib.metadata.version(name) for name in ("torch", "triton")}
    finish({**result, **measure(machine, benchmarks)}, args.out)


if __name__ == "__main__":
    main()
