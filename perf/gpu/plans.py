"""Milliseconds of a decode step of TensorRT plans, against the `cuda` engine on the same GPU.

`Engine.execute` alone, logits on the host included, on the same step inputs: so many requests of so
many tokens, at every tier. Each target that this machine has is built with weights in dtype and in
every format that the GPU takes, and is run with and without CUDA graphs; rounds alternate with the
peer. What cannot be built or does not fit says so in its place.
Usage: PYTHONPATH=perf python perf/gpu/plans.py FAMILY [--out FILE]; `--targets reference --peer
reference --dtype float32` runs the same on the CPU.
Status: tried on the CPU only; it has not run on a GPU.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from report import finish, show, spread

from mfs_trt.builder.build import build_engine
from mfs_trt.builder.config import BuildConfig, parse_nbytes
from mfs_trt.builder.weight_formats import WEIGHT_FORMATS
from mfs_trt.engine import load_engine
from mfs_trt.engine.cuda_graphs import SWITCH
from mfs_trt.engine.interface import Engine, EngineLimits, SegmentInput, StepInput
from mfs_trt.engine.tensorrt_api import TARGETS as TENSORRT_TARGETS
from mfs_trt.errors import MfsError

Case = tuple[int, int]  # requests, tokens of each


def decode_step(engine: Engine, tier: int, case: Case) -> StepInput | None:
    """The last token of every request, to leave at `tier`; None where the arena is too small."""
    num_reqs, length = case
    spec = engine.kv_spec
    num_blocks = -(-length // spec.block_size)
    groups = spec.groups_per_segment[: tier + 1]
    if 1 + num_reqs * num_blocks * sum(groups) > spec.num_frames:
        return None
    frames = iter(range(1, spec.num_frames))
    rows = np.arange(num_reqs, dtype=np.int32)
    position, no_rows = length - 1, np.zeros(0, np.int32)
    segments: list[SegmentInput | None] = [None] * len(spec.groups_per_segment)
    for s, m in enumerate(groups):
        mine = [next(frames) for _ in range(num_reqs * num_blocks * m)]
        tables = np.array(mine, np.int32).reshape(num_reqs, num_blocks, m)
        slots = tables[:, position // spec.block_size] * spec.block_size
        segments[s] = SegmentInput(
            source_rows=rows,
            positions=np.full(num_reqs, position, np.int32),
            slot_mapping=(slots + position % spec.block_size).astype(np.int32),
            query_start_loc=np.arange(num_reqs + 1, dtype=np.int32),
            seq_lens=np.full(num_reqs, length, np.int32),
            block_tables=tables,
            variant_ids=np.zeros(num_reqs, np.int32),
            save_features=np.full(num_reqs, -1, np.int32),
            exit_rows=rows if s == tier else no_rows,
        )
    return StepInput(5 + rows, tuple(segments))


def time_ms(engine: Engine, step: StepInput) -> float:
    started = time.perf_counter()
    engine.execute(step)  # ends with a copy to the host
    return 1000 * (time.perf_counter() - started)


def configurations(targets: list[str]) -> Iterator[tuple[str, str, str, bool]]:
    """Name, target, weight format, and whether CUDA graphs are used."""
    for target in targets:
        formats = ("", *WEIGHT_FORMATS) if target in TENSORRT_TARGETS else ("",)
        for weight_format in formats:
            name = " ".join(filter(None, (target, weight_format)))
            yield name, target, weight_format, True
            if target != "reference" and not weight_format:
                yield f"{name}, no graphs", target, weight_format, False


@contextmanager
def loaded(make_config: Callable[[], BuildConfig], family: Path, graphs: bool) -> Iterator[Engine]:
    """Built into a scratch folder, loaded, closed."""
    os.environ[SWITCH] = "1" if graphs else "0"
    with tempfile.TemporaryDirectory() as scratch:
        engine = load_engine(build_engine(family, Path(scratch) / "engine", make_config()))
        try:
            yield engine
        finally:
            engine.close()


def measure(
    engine: Engine, peer: Engine, cases: list[Case], rounds: int
) -> tuple[dict[str, Any], list[tuple[Any, ...]]]:
    """Case and tier → figures; and rows of a table."""
    figures: dict[str, Any] = {}
    rows = []
    for case in cases:
        for tier, spec in enumerate(engine.family.tiers):
            name = f"{case[0]} requests of {case[1]}, {spec.name}"
            step, theirs = (decode_step(e, tier, case) for e in (engine, peer))
            if step is None or theirs is None:
                figures[name] = {"left_out": "the KV arena is too small: --memory"}
                continue
            for _ in range(3):  # kernels are compiled, runs are recorded
                time_ms(engine, step), time_ms(peer, theirs)
            times = [(time_ms(engine, step), time_ms(peer, theirs)) for _ in range(rounds)]
            ours, others = np.array(times).T
            figures[name] = {
                "ms": spread(ours),
                "peer_ms": spread(others),
                "peer_over_ours": spread(others / ours),
            }
            medians = (figures[name][key]["median"] for key in ("ms", "peer_ms", "peer_over_ours"))
            rows.append((name, *medians))
    return figures, rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("family", type=Path)
    parser.add_argument("--targets", nargs="+", default=list(TENSORRT_TARGETS))
    parser.add_argument("--peer", default="cuda")
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--memory", default="8GiB")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 1024])
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    cases = [(batch, length) for batch in args.batches for length in args.lengths]
    limits = EngineLimits(max(args.batches), 512, max(args.lengths) + 1)

    def config(target: str, weight_format: str) -> BuildConfig:
        gpus: tuple[str, ...] = ()
        if target == "tensorrt-rtx":
            gpus = ("sm{}{}".format(*torch.cuda.get_device_capability()),)
        return BuildConfig(
            target=target,
            dtype=args.dtype,
            memory_nbytes=parse_nbytes(args.memory),
            limits=limits,
            weight_format=weight_format,
            compute_capabilities=gpus,
        )

    result: dict[str, Any] = {"benchmark": "tensorrt_plans", "peer": args.peer}
    result |= {"dtype": args.dtype, "family": args.family.name}
    with loaded(lambda: config(args.peer, ""), args.family, True) as peer:
        for name, target, weight_format, graphs in configurations(args.targets):
            try:
                with loaded(
                    lambda t=target, w=weight_format: config(t, w), args.family, graphs
                ) as engine:
                    result[name], rows = measure(engine, peer, cases, args.rounds)
            except (MfsError, torch.OutOfMemoryError) as error:
                result[name] = {"left_out": str(error).splitlines()[0]}
                continue
            show(name, ["step", "ms", f"{args.peer} ms", f"{args.peer} over it"], rows)
    finish(result, args.out)


if __name__ == "__main__":
    main()
