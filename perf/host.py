"""Host work of a step (schedule, prepare, update) against the engine's time, at 8, 64 and 256
running requests.

Both are timed inside the same steps of one core: mixed tiers in decode, block boundaries included.
Deciding, which samples, is shown beside them.
Usage: python perf/host.py FAMILY [--out FILE]
"""

import argparse
import tempfile
import time
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path

from decoding import PROMPT_TOKENS, Decoding
from report import finish, show, spread

from mfs_trt.builder.build import build_engine
from mfs_trt.builder.config import BuildConfig
from mfs_trt.engine.interface import EngineLimits
from mfs_trt.engine.threads import wait_passively

PARTS = ("schedule", "prepare", "update", "host", "decide")


class Stopwatch:
    """Seconds per named part, one value per step."""

    def __init__(self) -> None:
        self.parts: dict[str, list[float]] = defaultdict(list)

    @contextmanager
    def time(self, name: str):
        started = time.perf_counter()
        yield
        self.parts[name].append(time.perf_counter() - started)

    def wrap(self, owner: object, attribute: str, name: str) -> None:
        """Time each call of `owner.attribute`."""
        inner = getattr(owner, attribute)

        def timed(*args, **kwargs):
            with self.time(name):
                return inner(*args, **kwargs)

        setattr(owner, attribute, timed)


def measure(family: Path, num_running: int, num_steps: int) -> dict[str, list[float]]:
    import mfs_trt.serving.core as core_module

    limits = EngineLimits(max_num_seqs=num_running, max_num_batched_tokens=512, max_model_len=512)
    with tempfile.TemporaryDirectory() as folder:
        config = BuildConfig(limits=limits, memory_nbytes=4 << 30)
        core = core_module.load_core(build_engine(family, Path(folder) / "engine", config))
    tiers = [t.name for t in core.family.tiers]
    decoding = Decoding(core, [tiers[i % len(tiers)] for i in range(num_running)])
    watch = Stopwatch()
    watch.wrap(core.scheduler, "schedule", "schedule")
    watch.wrap(core.scheduler, "update", "update")
    watch.wrap(core.engine, "execute", "engine")
    prepare, decide = core_module.prepare, core_module.decide
    watch.wrap(core_module, "decide", "decide")
    watch.wrap(core_module, "prepare", "prepare")
    try:
        for _ in range(num_steps):
            decoding.step_ms()
    finally:
        core_module.prepare, core_module.decide = prepare, decide
    core.engine.close()
    return watch.parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("family", type=Path)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    wait_passively()
    figures = {}
    for num_running in (8, 64, 256):
        parts = measure(args.family, num_running, args.steps)
        parts["host"] = [
            sum(three)
            for three in zip(parts["schedule"], parts["prepare"], parts["update"], strict=True)
        ]
        figures[num_running] = {k: spread([1000 * v for v in vs]) for k, vs in parts.items()}
    rows = [
        (
            n,
            *(f[part]["median"] for part in PARTS),
            f["engine"]["median"],
            f"{100 * f['host']['median'] / f['engine']['median']:.2f} %",
        )
        for n, f in figures.items()
    ]
    columns = [
        "running",
        "schedule",
        "prepare",
        "update",
        "host",
        "decide",
        "engine",
        "host/engine",
    ]
    show("milliseconds per decode step, medians", columns, rows)
    result = {"benchmark": "host", "prompt_tokens": PROMPT_TOKENS, "ms_per_step": figures}
    finish(result, args.out)


if __name__ == "__main__":
    main()
