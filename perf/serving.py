"""Latency and throughput of the server per tier, by perf_analyzer, over gRPC streams and over
server-sent events.

One run a transport at each concurrency, tiers mixed in equal parts by request; prints time to first
token, inter-token latency and output tokens per second for each tier. Usage: python perf/serving.py
FAMILY_OR_ENGINE [--concurrency 1 8] [--out FILE]
"""

import argparse
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import perf_analyzer
from report import finish, show

from mfs_trt.builder.cache import resolve_engine
from mfs_trt.engine.manifest import EngineManifest
from mfs_trt.engine.threads import PASSIVE_WAITING
from mfs_trt.serving.launcher import TritonServer

PROMPT = "Gravity is a force that pulls everything on Earth towards the centre of the planet."


def grpc_run(server: TritonServer, tiers: list[str], args, concurrency: int, scratch: Path):
    inputs = [
        {
            "text_input": [PROMPT],
            "max_tokens": [args.output_tokens],
            "min_tokens": [args.output_tokens],
            "exclude_input_in_output": [True],
            "stream": [True],
            "tier": [tier],
        }
        for tier in tiers
    ]
    arguments = [
        "-m", "ensemble", "-i", "grpc", "--streaming", "-u", f"127.0.0.1:{server.grpc_port}",
        f"--concurrency-range={concurrency}", f"--measurement-request-count={args.requests}",
    ]  # fmt: skip
    return perf_analyzer.run(arguments, inputs, scratch, f"grpc-{concurrency}")


def sse_run(server: TritonServer, tiers: list[str], args, concurrency: int, scratch: Path):
    payloads = [
        {
            "text_input": PROMPT,
            "max_tokens": args.output_tokens,
            "min_tokens": args.output_tokens,
            "exclude_input_in_output": True,
            "stream": True,
            "tier": tier,
        }
        for tier in tiers
    ]
    arguments = [
        "-m", "ensemble", "-i", "http", "--service-kind=openai",
        "--endpoint=v2/models/ensemble/generate_stream", "-u", f"127.0.0.1:{server.http_port}",
        f"--concurrency-range={concurrency}", f"--measurement-request-count={args.requests}",
    ]  # fmt: skip
    inputs = [{"payload": [payload]} for payload in payloads]
    return perf_analyzer.run(arguments, inputs, scratch, f"sse-{concurrency}")


def figures(responses: list[perf_analyzer.Response]) -> dict[str, Any]:
    """Milliseconds and tokens per second; throughput is of the whole run, split by tier."""
    by_tier = defaultdict(list)
    for response in responses:
        by_tier[response.tier].append(response)
    begin = min(r.started_ns for r in responses)
    seconds = (max(r.token_times_ns[-1] for r in responses) - begin) / 1e9
    result = {}
    for tier, mine in sorted(by_tier.items()):
        first = [(r.token_times_ns[0] - r.started_ns) / 1e6 for r in mine]
        between = [d / 1e6 for r in mine for d in np.diff(r.token_times_ns)] or [float("nan")]
        result[tier] = {
            "requests": len(mine),
            "time_to_first_token_ms": _percentiles(first),
            "inter_token_latency_ms": _percentiles(between),
            "output_token_throughput": sum(len(r.token_times_ns) for r in mine) / seconds,
        }
    return result


def _percentiles(values: list[float]) -> dict[str, float]:
    p50, p99 = np.percentile(values, [50, 99])
    return {"p50": float(p50), "p99": float(p99)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--requests", type=int, default=24, help="requests in a window")
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    engine = resolve_engine(args.engine)
    tiers = [t.name for t in EngineManifest.load(engine).load_family().tiers]
    result: dict[str, Any] = {"benchmark": "serving", "output_tokens": args.output_tokens}
    with (
        TritonServer(engine, environment=PASSIVE_WAITING) as server,
        tempfile.TemporaryDirectory() as scratch,
    ):
        for transport, run in (("grpc", grpc_run), ("sse", sse_run)):
            for concurrency in args.concurrency:
                responses = run(server, tiers, args, concurrency, Path(scratch))
                result[f"{transport}, concurrency {concurrency}"] = figures(responses)
    rows = [
        (
            name,
            tier,
            f["time_to_first_token_ms"]["p50"],
            f["time_to_first_token_ms"]["p99"],
            f["inter_token_latency_ms"]["p50"],
            f["inter_token_latency_ms"]["p99"],
            f["output_token_throughput"],
        )
        for name, tiers_of in result.items()
        if isinstance(tiers_of, dict)
        for tier, f in tiers_of.items()
    ]
    columns = ["run", "tier", "TTFT p50", "p99", "ITL p50", "p99", "tokens/s"]
    show("milliseconds; output tokens per second", columns, rows)
    finish(result, args.out)


if __name__ == "__main__":
    main()
