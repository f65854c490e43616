"""Time between tokens of running streams while long prompts arrive, with pacing and without.

STREAMS requests decode; a prompt of `--prompt` tokens arrives every `--every` steps, one at a time.
Streams without any prompt are beside it: what they show is the machine's own unrest. All ways run
in turns in one process. Usage: python perf/tail_latency.py ENGINE [--out FILE]
"""

import argparse
import itertools
import time
from pathlib import Path
from typing import Any

import numpy as np
from report import finish, show, spread

from mfs_trt.engine.threads import wait_passively


def inter_token_ms(core, ids, streams: int, prompt: int, every: int, steps: int) -> list[float]:
    """Milliseconds between tokens of the streams, one a step while prompts come and go."""
    from mfs_trt.request import PromptRequest
    from mfs_trt.sampling_params import SamplingParams

    rng = np.random.default_rng(0)

    def add(num_tokens: int, max_tokens: int) -> str:
        name = str(next(ids))
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        token_ids = rng.integers(5, 2000, num_tokens).tolist()
        request = PromptRequest(name, params, token_ids=token_ids, reuse_prefix=False)
        for sequence in core.make_requests(request):
            core.add(sequence)
        return name

    names = {add(32, steps + 200) for _ in range(streams)}
    while not all(r.num_output_tokens for r in core.scheduler.requests.values()):
        core.step()
    waits = []
    for step in range(steps):
        if prompt and step % every == 0 and len(core.scheduler.requests) == streams:
            add(prompt, 1)
        started = time.perf_counter()
        core.step()
        waits.append(1000 * (time.perf_counter() - started))
    for name in names:
        core.abort(name)
    while core.has_requests:
        core.step()
    return waits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=1900)
    parser.add_argument("--every", type=int, default=60)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    wait_passively()
    from mfs_trt.serving.core import load_core

    core = load_core(args.engine)
    pacing = core.pacing
    ids = itertools.count()
    sizes = args.streams, args.prompt, args.every, args.steps
    inter_token_ms(core, ids, args.streams, args.prompt, args.every, 40)  # the first one warms up
    alone = args.streams, 0, args.every, args.steps
    found: dict[str, list[list[float]]] = {"no prompts": [], "paced": [], "not paced": []}
    for _ in range(args.rounds):
        for name, waits in found.items():
            core.scheduler.pacing = None if name == "not paced" else pacing
            waits.append(inter_token_ms(core, ids, *(alone if name == "no prompts" else sizes)))
    result: dict[str, Any] = {"benchmark": "tail_latency", "engine": Path(args.engine).name}
    rows = []
    for name, waits in found.items():
        p50, p99 = np.percentile(np.concatenate(waits), [50, 99])
        ratios = spread([float(np.percentile(w, 99) / np.percentile(w, 50)) for w in waits])
        result[name] = {"p50_ms": float(p50), "p99_ms": float(p99), "p99_over_p50": ratios}
        rows.append((name, float(p50), float(p99), ratios["median"]))
    show("between tokens of running streams", ["way", "p50 ms", "p99 ms", "p99/p50"], rows)
    finish(result, args.out)


if __name__ == "__main__":
    main()
