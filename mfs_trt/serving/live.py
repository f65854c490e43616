"""The live line of `mfs-trt serve`: requests and tokens per second, read from the metrics page."""

import re
import time
from dataclasses import dataclass

from rich.console import Console
from rich.live import Live
from rich.text import Text

from mfs_trt.serving.launcher import TritonServer

LIVE_PERIOD_S = 1.0  # on a terminal
PLAIN_PERIOD_S = 10.0  # anywhere else

_LINE = re.compile(r"^(\w+)\{([^}]*)\} (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Sample:
    """One reading of the counters and gauges that the line is made of."""

    time_s: float
    num_finished: float = 0.0
    num_output_tokens: float = 0.0
    num_running: float = 0.0
    num_waiting: float = 0.0
    kv_fraction: float = 0.0
    is_healthy: bool = True


def read_sample(page: str, time_s: float) -> Sample:
    """Sum a Prometheus text page up into a `Sample`."""
    totals: dict[str, float] = {}
    for name, labels, value in _LINE.findall(page):
        if name.startswith(("mfs_", "nv_trt_llm_")):
            for key in (name, *(f"{name}:{v}" for v in re.findall(r'="([^"]*)"', labels))):
                totals[key] = totals.get(key, 0.0) + float(value)
    return Sample(
        time_s=time_s,
        num_finished=totals.get("mfs_requests_finished_total", 0.0),
        num_output_tokens=totals.get("mfs_output_tokens_total", 0.0),
        num_running=totals.get("nv_trt_llm_request_metrics:scheduled", 0.0),
        num_waiting=totals.get("nv_trt_llm_request_metrics:waiting", 0.0),
        kv_fraction=totals.get("nv_trt_llm_kv_cache_block_metrics:fraction", 0.0),
        is_healthy=totals.get("mfs_engine_healthy", 1.0) > 0,
    )


def format_line(before: Sample, now: Sample) -> str:
    elapsed_s = max(now.time_s - before.time_s, 1e-9)
    requests_per_s = (now.num_finished - before.num_finished) / elapsed_s
    tokens_per_s = (now.num_output_tokens - before.num_output_tokens) / elapsed_s
    health = "" if now.is_healthy else "  ENGINE UNHEALTHY"
    return (
        f"{requests_per_s:.1f} requests/s  {tokens_per_s:.0f} tokens/s  "
        f"{now.num_running:.0f} running  {now.num_waiting:.0f} waiting  "
        f"KV {now.kv_fraction:.0%}{health}"
    )


def watch(server: TritonServer, console: Console) -> None:
    """Show the line until the server ends."""
    before = _sample(server) or Sample(time.monotonic())
    if not console.is_terminal:
        while not server.wait(PLAIN_PERIOD_S):
            now = _sample(server)
            if now is not None:
                console.print(format_line(before, now), highlight=False)
                before = now
        return
    with Live(Text("waiting for requests"), console=console, transient=True) as live:
        while not server.wait(LIVE_PERIOD_S):
            now = _sample(server)
            if now is not None:
                live.update(Text(format_line(before, now)))
                before = now


def _sample(server: TritonServer) -> Sample | None:
    try:
        return read_sample(server.read_metrics(), time.monotonic())
    except OSError:  # a busy or ending server; the next reading tells more
        return None
