"""Output tokens per second through Triton server's gRPC streams against the offline loop, in turns.

Both decode the same requests on the same engine folder, each in a process of its own; while one is
measured the other is idle. Clients are one thread a stream, on the same cores as the server. All
streams start at once: short answers measure mostly how prompts and decodes share steps, long ones
what the server costs. Usage: python perf/server_overhead.py ENGINE [--streams 32] [--out FILE]
"""

import argparse
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from report import finish, show, spread

from mfs_trt.client import Client
from mfs_trt.engine.threads import PASSIVE_WAITING, wait_passively
from mfs_trt.sampling_params import SamplingParams
from mfs_trt.serving.launcher import TritonServer

PROMPT_TOKENS = 64


def offline_rate(llm, prompts: list[str], params: SamplingParams) -> float:
    started = time.perf_counter()
    outputs = llm.generate(prompts, params)
    num_tokens = sum(len(o.outputs[0].token_ids) for o in outputs)
    return num_tokens / (time.perf_counter() - started)


def served_rate(url: str, prompts: list[str], params: SamplingParams) -> float:
    """All streams start together; the rate is over the time until the last one ends."""
    counts = [0] * len(prompts)
    barrier = threading.Barrier(len(prompts) + 1)

    def run(i: int) -> None:
        with Client(url) as client:
            barrier.wait()
            for chunk in client.stream(prompts[i], params=params):
                counts[i] += chunk.num_new_tokens

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    barrier.wait()
    started = time.perf_counter()
    for thread in threads:
        thread.join()
    return sum(counts) / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--output-tokens", type=int, nargs="+", default=[48, 128])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    wait_passively()
    from mfs_trt.llm import LLM

    llm = LLM(args.engine)
    words = ["gravity", "light", "stone", "river", "wind", "fire", "earth", "moon"]
    prompts = [
        " ".join(words[(i + j) % len(words)] for j in range(PROMPT_TOKENS))
        for i in range(args.streams)
    ]
    result: dict[str, Any] = {"benchmark": "server_overhead", "streams": args.streams}
    rows = []
    with TritonServer(args.engine, environment=PASSIVE_WAITING) as server:
        url = f"127.0.0.1:{server.grpc_port}"
        for length in args.output_tokens:
            params = SamplingParams(max_tokens=length, ignore_eos=True)
            served_rate(url, prompts, params)  # warm
            offline, served = [], []
            for _ in range(args.rounds):
                offline.append(offline_rate(llm, prompts, params))
                served.append(served_rate(url, prompts, params))
            ratios = [b / a for a, b in zip(offline, served, strict=True)]
            result[f"{length} output tokens"] = {
                "offline_tokens_per_s": spread(offline),
                "served_tokens_per_s": spread(served),
                "ratio": spread(ratios),
            }
            medians = (float(np.median(values)) for values in (offline, served, ratios))
            rows.append((length, *medians))
    columns = ["output tokens", "offline", "through Triton", "ratio"]
    show(f"output tokens per second of {args.streams} streams", columns, rows)
    finish(result, args.out)


if __name__ == "__main__":
    main()
