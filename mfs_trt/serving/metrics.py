"""The worker's metrics on Triton server's metrics endpoint: TensorRT-LLM's families and our own.

Values come from `AsyncEngine.stats()` once a period and from finished sequences. Of TensorRT-LLM's
families only the rows that have a source here are published. A server with metrics switched off is
survived: `is_enabled`.
"""

import logging
import os
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)

SECONDS_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
INTER_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
TOKEN_LENGTH_BUCKETS = (10.0, 50.0, 100.0, 500.0, 1000.0)  # as in TensorRT-LLM's backend

_Label = str | tuple[str, ...] | None
_Value = str | tuple[str, ...]  # of the label, or of each

_PAGE_NBYTES = os.sysconf("SC_PAGE_SIZE")

# family name: (help, label that tells its rows apart, or several)
_GAUGES: dict[str, tuple[str, _Label]] = {
    "nv_trt_llm_request_metrics": ("Requests in the engine", "request_type"),
    "nv_trt_llm_runtime_memory_metrics": ("Memory of the worker in bytes", "memory_type"),
    "nv_trt_llm_kv_cache_block_metrics": ("KV memory in frames", "kv_cache_block_type"),
    "nv_trt_llm_inflight_batcher_metrics": (
        "In-flight batching", "inflight_batcher_specific_metric",
    ),
    "nv_trt_llm_general_metrics": ("Time and steps", "general_type"),
    "mfs_engine_healthy": ("1 while the engine accepts and runs requests", None),
}  # fmt: skip
_COUNTERS: dict[str, tuple[str, _Label]] = {
    "mfs_requests_finished_total": ("Requests answered in full", None),
    "mfs_requests_failed_total": ("Requests that ended with an error, cancelled ones too", None),
    "mfs_prompt_tokens_total": ("Prompt tokens of the requests that ended", None),
    "mfs_output_tokens_total": ("Generated tokens", "tier"),
    "mfs_preemptions_total": (
        "Requests that gave up their KV memory and were computed again",
        None,
    ),
    "mfs_steps_total": ("Steps of the engine", None),
    "mfs_rows_total": ("Tokens computed", "segment"),
    "mfs_reused_tokens_total": ("Tokens found in the prefix cache", "segment"),
    "mfs_draft_tokens_total": ("Drafts that were decided on, by the tier that made them", "tier"),
    "mfs_accepted_draft_tokens_total": ("Drafts that stood, by the tier that made them", "tier"),
    "mfs_tier_switches_total": ("Requests that went on at another tier", ("policy", "direction")),
}
_HISTOGRAMS: dict[str, tuple[str, str, tuple[float, ...]]] = {
    "mfs_time_to_first_token_seconds": ("Time to first token", "tier", SECONDS_BUCKETS),
    "mfs_inter_token_latency_seconds": (
        "Mean time between tokens of one sequence", "tier", INTER_TOKEN_BUCKETS,
    ),
    "mfs_request_latency_seconds": ("Arrival to last token", "tier", SECONDS_BUCKETS),
    "nv_llm_output_token_len": ("Output length", "response_metric_type", TOKEN_LENGTH_BUCKETS),
    "nv_llm_input_token_len": ("Prompt length", "response_metric_type", TOKEN_LENGTH_BUCKETS),
}  # fmt: skip


@dataclass(frozen=True)
class FinishedSequence:
    """What the histograms need to know of one sequence that finished."""

    tier: str
    num_prompt_tokens: int
    num_output_tokens: int
    arrival_time_ns: int
    first_token_time_ns: int
    last_token_time_ns: int


class WorkerMetrics:
    """Registers the families when made; `update` writes them. One thread calls `update`."""

    def __init__(self, pb_utils: Any, model_name: str, model_version: str):
        self.is_enabled = True
        self._labels = {"model": model_name, "version": model_version}
        self._pb_utils = pb_utils
        self._families: dict[str, tuple[Any, _Label, tuple[float, ...] | None]] = {}
        self._metrics: dict[tuple[str, _Value], Any] = {}
        self._counts: dict[tuple[str, _Value], float] = {}
        self._finished: deque[FinishedSequence] = deque(maxlen=100_000)
        try:
            self._register()
        except Exception as error:  # the server's only sign that metrics are switched off
            self.is_enabled = False
            logger.warning("metrics are off: %s", error)

    def record(self, sequence: FinishedSequence) -> None:
        """Note a finished sequence; cheap, from any thread."""
        if self.is_enabled:
            self._finished.append(sequence)

    def update(self, stats: Any, max_num_seqs: int) -> None:
        """Write `stats` (an `EngineStats`) and the sequences recorded since the last call."""
        if not self.is_enabled:
            return
        self._update_gauges(stats, max_num_seqs)
        self._count("mfs_requests_finished_total", "", stats.num_requests_finished_total)
        self._count("mfs_requests_failed_total", "", stats.num_requests_failed_total)
        self._count("mfs_prompt_tokens_total", "", stats.num_prompt_tokens_total)
        self._count("mfs_preemptions_total", "", stats.num_preemptions_total)
        self._count("mfs_steps_total", "", stats.num_steps_total)
        for segment, count in enumerate(stats.num_rows_by_segment):
            self._count("mfs_rows_total", str(segment), count)
        for segment, count in enumerate(stats.num_reused_tokens_by_segment):
            self._count("mfs_reused_tokens_total", str(segment), count)
        for tier, count in stats.draft_tokens_by_tier.items():
            self._count("mfs_draft_tokens_total", tier, count)
        for tier, count in stats.accepted_draft_tokens_by_tier.items():
            self._count("mfs_accepted_draft_tokens_total", tier, count)
        for tier, num_tokens in stats.output_tokens_by_tier.items():
            if num_tokens:
                self._count("mfs_output_tokens_total", tier, num_tokens)
        for policy_and_direction, count in stats.num_tier_switches.items():
            self._count("mfs_tier_switches_total", policy_and_direction, count)
        while self._finished:
            self._observe(self._finished.popleft())

    def set_healthy(self, is_healthy: bool) -> None:
        if self.is_enabled:
            self._set("mfs_engine_healthy", "", float(is_healthy))

    def close(self) -> None:
        """Let go of the server's metrics; they must not outlive the model."""
        self.is_enabled = False
        self._metrics.clear()
        self._families.clear()

    def _register(self) -> None:
        family = self._pb_utils.MetricFamily
        for kind, table in ((family.GAUGE, _GAUGES), (family.COUNTER, _COUNTERS)):
            for name, (description, label) in table.items():
                made = family(name=name, description=description, kind=kind)
                self._families[name] = (made, label, None)
        for name, (description, label, buckets) in _HISTOGRAMS.items():
            made = family(name=name, description=description, kind=family.HISTOGRAM)
            self._families[name] = (made, label, buckets)

    def _metric(self, family: str, value: _Value) -> Any:
        if (family, value) not in self._metrics:
            made, label, buckets = self._families[family]
            pairs = zip(label, value, strict=True) if isinstance(label, tuple) else [(label, value)]
            labels = {**self._labels, **{k: v for k, v in pairs if k}}
            more = {"buckets": list(buckets)} if buckets else {}
            self._metrics[family, value] = made.Metric(labels=labels, **more)
        return self._metrics[family, value]

    def _set(self, family: str, value: _Value, number: float) -> None:
        self._metric(family, value).set(float(number))

    def _count(self, family: str, value: _Value, total: float) -> None:
        """Bring a counter up to `total`; Triton server's counters only know increments."""
        metric = self._metric(family, value)
        grown = total - self._counts.get((family, value), 0)
        if grown > 0:
            metric.increment(float(grown))
            self._counts[family, value] = total

    def _update_gauges(self, stats: Any, max_num_seqs: int) -> None:
        self.set_healthy(stats.is_healthy)
        requests = {
            "active": stats.num_running + stats.num_waiting,
            "max": max_num_seqs,
            "scheduled": stats.num_running,
            "waiting": stats.num_waiting,
        }
        for name, number in requests.items():
            self._set("nv_trt_llm_request_metrics", name, number)
        frames = {
            "max": stats.num_frames_total,
            "used": stats.num_frames_used,
            "free": stats.num_frames_total - stats.num_frames_used,
            "fraction": stats.num_frames_used / max(stats.num_frames_total, 1),
            "tokens_per": stats.block_size,
        }
        for name, number in frames.items():
            self._set("nv_trt_llm_kv_cache_block_metrics", name, number)
        self._set("nv_trt_llm_runtime_memory_metrics", "cpu", _resident_nbytes())
        self._set("nv_trt_llm_inflight_batcher_metrics", "generation_requests", stats.num_running)
        self._set("nv_trt_llm_general_metrics", "iteration_counter", stats.num_steps_total)
        self._set("nv_trt_llm_general_metrics", "timestamp", time.time())

    def _observe(self, sequence: FinishedSequence) -> None:
        first, last = sequence.first_token_time_ns, sequence.last_token_time_ns
        arrival = sequence.arrival_time_ns
        seconds = {}
        if first:
            seconds["mfs_time_to_first_token_seconds"] = (first - arrival) / 1e9
            seconds["mfs_request_latency_seconds"] = (last - arrival) / 1e9
        if sequence.num_output_tokens > 1:
            mean_s = (last - first) / 1e9 / (sequence.num_output_tokens - 1)
            seconds["mfs_inter_token_latency_seconds"] = mean_s
        for name, value in seconds.items():
            self._metric(name, sequence.tier).observe(value)
        output, prompt = sequence.num_output_tokens, sequence.num_prompt_tokens
        self._metric("nv_llm_output_token_len", "total_output_tokens").observe(float(output))
        self._metric("nv_llm_input_token_len", "total_input_tokens").observe(float(prompt))


def _resident_nbytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * _PAGE_NBYTES
