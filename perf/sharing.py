"""What sharing across requests and tiers saves, each as a ratio of two ways in turns in one
process.

prefix: time to the first token of prompts that share 512 tokens, with the prefix cache and without;
also when the prefix was computed at another tier. escalation: a request of `--context` tokens moves
from the lowest tier to the top: time to its next token with kept features, against a new top-tier
request with the same tokens and no cache. Usage: python perf/sharing.py ENGINE [--out FILE]
"""

import argparse
import itertools
import time
from pathlib import Path
from typing import Any

import numpy as np
from report import finish, show, spread

from mfs_trt.engine.threads import wait_passively

SHARED_TOKENS = 512
OWN_TOKENS = 16


class Served:
    """A core on which one request at a time is timed."""

    def __init__(self, engine_dir: str) -> None:
        from mfs_trt.serving.core import load_core

        self.core = load_core(engine_dir)
        self._ids = itertools.count()

    def add(self, token_ids: list[int], tier: str, max_tokens: int = 1, **more: Any) -> str:
        from mfs_trt.request import PromptRequest
        from mfs_trt.sampling_params import SamplingParams

        name = str(next(self._ids))
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        request = PromptRequest(name, params, token_ids=token_ids, tier=tier, **more)
        for sequence in self.core.make_requests(request):
            self.core.add(sequence)
        return name

    def until_token_ms(self) -> float:
        """Milliseconds until the next token of whoever runs."""
        started = time.perf_counter()
        while not any(event.token_ids for event in self.core.step()):
            pass
        return 1000 * (time.perf_counter() - started)

    def drain(self) -> None:
        while self.core.has_requests:
            self.core.step()


def tokens(rng: np.random.Generator, count: int) -> list[int]:
    return rng.integers(5, 2000, count).tolist()


def measure_prefix(served: Served, rng: np.random.Generator, first: str, then: str) -> dict:
    """One round: a prefix computed at tier `first`, then asked for at tier `then`."""
    prefix = tokens(rng, SHARED_TOKENS)
    served.add(prefix + tokens(rng, OWN_TOKENS), first)
    served.drain()
    served.add(prefix + tokens(rng, OWN_TOKENS), then)
    warm = served.until_token_ms()
    served.drain()
    served.add(prefix + tokens(rng, OWN_TOKENS), then, reuse_prefix=False)
    cold = served.until_token_ms()
    served.drain()
    return {"cold": cold, "warm": warm}


def measure_escalation(served: Served, rng: np.random.Generator, context: int) -> dict:
    low, top = served.core.family.tiers[0].name, served.core.family.tiers[-1].name
    text = tokens(rng, context)
    name = served.add(text, low, max_tokens=8, reuse_prefix=False)
    served.until_token_ms()
    before = list(served.core.scheduler.num_rows)
    served.core.switch_tier(name, top)
    escalated = served.until_token_ms()
    lower_rows = served.core.scheduler.num_rows[0] - before[0]
    served.drain()
    served.add(text, top, reuse_prefix=False)
    again = served.until_token_ms()
    served.drain()
    return {"cold": again, "warm": escalated, "lower_rows": lower_rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    wait_passively()
    served = Served(args.engine)
    rng = np.random.default_rng(0)
    names = [t.name for t in served.core.family.tiers]
    low, top = names[0], names[-1]
    ways = {
        f"prefix, {top} then {top}": lambda: measure_prefix(served, rng, top, top),
        f"prefix, {top} then {low}": lambda: measure_prefix(served, rng, top, low),
        f"prefix, {low} then {top}": lambda: measure_prefix(served, rng, low, top),
        "escalation": lambda: measure_escalation(served, rng, args.context),
    }
    result: dict[str, Any] = {"benchmark": "sharing", "engine": Path(args.engine).name}
    rows = []
    for name, measure in ways.items():
        measure()  # the first one warms up
        rounds = [measure() for _ in range(args.rounds)]
        ratios = spread([r["cold"] / r["warm"] for r in rounds])
        figures = {key: spread([r[key] for r in rounds]) for key in rounds[0]}
        result[name] = {"ratio": ratios, **figures}
        rows.append((name, figures["cold"]["median"], figures["warm"]["median"], ratios["median"]))
    show("time to the next token", ["what", "without ms", "with ms", "ratio"], rows)
    finish(result, args.out)


if __name__ == "__main__":
    main()
