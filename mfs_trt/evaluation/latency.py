"""Latency of every tier of an engine, measured on this machine, tiers taking turns."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mfs_trt.request import PromptRequest
from mfs_trt.sampling_params import SamplingParams
from mfs_trt.serving.core import EngineCore


@dataclass(frozen=True)
class Workload:
    """One request at a time: what a user of a chat notices."""

    prompt_tokens: int = 256
    output_tokens: int = 16
    rounds: int = 5


@dataclass(frozen=True)
class DepthLatency:
    """Medians over rounds, in milliseconds."""

    num_layers: int
    prefill_ms: float  # the whole prompt, first token included
    decode_ms: float  # each further token

    @property
    def tokens_per_s(self) -> float:
        """Of decoding."""
        return 1000 / self.decode_ms

    def request_ms(self, output_tokens: int) -> float:
        """Of a whole request."""
        return self.prefill_ms + (output_tokens - 1) * self.decode_ms


def measure_latencies(core: EngineCore, workload: Workload) -> tuple[DepthLatency, ...]:
    """Every tier of the core's family, shallow to deep; each round runs all of them once.

    A first round warms up and is not counted. No other request may be in the core.
    """
    tiers = core.family.tiers
    times: dict[str, list[tuple[float, float]]] = {tier.name: [] for tier in tiers}
    for number in range(workload.rounds + 1):
        for tier in tiers:
            measured = _run(core, tier.name, workload, number)
            if number:
                times[tier.name].append(measured)
    return tuple(
        DepthLatency(tier.exit_layer, *np.median(times[tier.name], axis=0).tolist())
        for tier in tiers
    )


def _run(core: EngineCore, tier: str, workload: Workload, number: int) -> tuple[float, float]:
    """Milliseconds of the prompt, and the median of the further steps."""
    vocab_size = core.family.model.vocab_size
    # A prompt that no earlier request had, so that no prefix of it is cached.
    rng = np.random.default_rng([number, *tier.encode()])
    token_ids = rng.integers(0, vocab_size, workload.prompt_tokens).tolist()
    params = SamplingParams(max_tokens=workload.output_tokens, ignore_eos=True)
    request = PromptRequest(f"{tier}-{number}", params, token_ids=token_ids, tier=tier)
    for sequence in core.make_requests(request):
        core.add(sequence)
    prefill_ms, steps = 0.0, []
    has_begun = False
    while core.has_requests:
        events = core.step()
        step_ms = 1000 * core.last_step_duration_s
        if has_begun:
            steps.append(step_ms)
        else:
            prefill_ms += step_ms
            has_begun = bool(events)
    return prefill_ms, float(np.median(steps))


@dataclass(frozen=True)
class LatencyLine:
    """`intercept + slope · layers`: embedding and head, and what each layer adds, in ms."""

    intercept: float
    slope: float

    @classmethod
    def fit(cls, depths: Sequence[int], latencies_ms: Sequence[float]) -> "LatencyLine":
        """Least squares; one depth alone is a line through zero."""
        if len(depths) == 1:
            return cls(0.0, latencies_ms[0] / depths[0])
        slope, intercept = np.polyfit(depths, latencies_ms, 1)
        return cls(float(intercept), float(slope))

    def at(self, depth: float) -> float:
        return self.intercept + self.slope * depth

    def depth(self, latency_ms: float) -> float:
        """The depth that takes so long; infinite where depth makes no difference."""
        return (latency_ms - self.intercept) / self.slope if self.slope > 0 else math.inf
