"""What every depth of a family costs and is worth, and the exits that follow from it."""

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path
from typing import Any

from mfs_trt.builder.build import build_engine
from mfs_trt.builder.config import BuildConfig
from mfs_trt.checkpoint import open_checkpoint
from mfs_trt.dtypes import item_size
from mfs_trt.engine.interface import EngineLimits
from mfs_trt.evaluation.evaluation import Evaluation, evaluate_model
from mfs_trt.evaluation.latency import DepthLatency, LatencyLine, Workload, measure_latencies
from mfs_trt.evaluation.proposal import Proposal
from mfs_trt.evaluation.report import load_pyplot, save_figure
from mfs_trt.family.costs import kv_nbytes_per_layer
from mfs_trt.family.spec import FamilySpec, TierSpec
from mfs_trt.model.transformer import NestedModel
from mfs_trt.precipitation.packing import PackedTokens
from mfs_trt.serving.core import EngineCore, load_core
from mfs_trt.weights.added_exits import add_exits
from mfs_trt.weights.convert import convert_checkpoint
from mfs_trt.weights.store import WeightStore

MAX_CANDIDATES = 12
_ARENA_NBYTES = 64 << 20  # at least
_SPARE_REQUESTS = 4  # that the arena has room for


def candidate_depths(spec: FamilySpec) -> tuple[int, ...]:
    """Depths to look at: evenly spaced by the smallest divisor of the depth that gives at most
    `MAX_CANDIDATES` (by any number where none does), and the exits that exist.
    """
    depth = spec.model.num_layers
    least = ceil(depth / MAX_CANDIDATES)
    divisors = [step for step in range(least, depth // 2 + 1) if depth % step == 0]
    step = divisors[0] if divisors else least
    exits = {tier.exit_layer for tier in spec.tiers}
    return tuple(sorted(exits | set(range(step, depth, step)) | {depth}))


def profile_latencies(
    store: WeightStore, depths: Sequence[int], workload: Workload, target: str
) -> tuple[DepthLatency, ...]:
    """Latency after each of `depths` layers and after each exit of the family.

    Builds one engine for `target` with an exit after each, in a temporary folder.
    """
    with tempfile.TemporaryDirectory() as scratch:
        add_exits(store, depths, Path(scratch) / "family")
        core = _core(Path(scratch), workload, target)
        try:
            return measure_latencies(core, workload)
        finally:
            core.engine.close()


def model_latency(checkpoint: Path, dtype: str, workload: Workload, target: str) -> DepthLatency:
    """Latency of a whole other model, on the same kind of engine."""
    with tempfile.TemporaryDirectory() as scratch:
        reader = open_checkpoint(checkpoint)
        tier = TierSpec("all", reader.config.num_layers)
        convert_checkpoint(reader, [tier], Path(scratch) / "family", dtype=dtype)
        core = _core(Path(scratch), workload, target)
        try:
            return measure_latencies(core, workload)[0]
        finally:
            core.engine.close()


def profile_losses(
    store: WeightStore, depths: Sequence[int], tokens: PackedTokens, max_sequences: int | None
) -> Evaluation:
    """Loss after each depth, and how it drafts for the whole. An exit that the family does not have
    is untrained: it has the top tier's gain and the shared head.
    """
    with tempfile.TemporaryDirectory() as scratch:
        spec = add_exits(store, depths, Path(scratch) / "family")
        model = NestedModel.from_store(WeightStore(Path(scratch) / "family"), tokens.seq_length)
        top = len(spec.tiers) - 1
        pairs = [(draft, top) for draft in range(top)]
        return evaluate_model(model, tokens, pairs=pairs, max_sequences=max_sequences)


@dataclass(frozen=True)
class Profile:
    """All that `mfs-trt profile` found."""

    family: str
    revision: str
    num_layers: int
    target: str
    workload: Workload
    latencies: tuple[DepthLatency, ...]
    evaluation: Evaluation | None
    wanted: tuple[tuple[str, float], ...]  # (why, depth in layers)
    proposal: Proposal

    def to_json(self) -> dict[str, Any]:
        losses = self.evaluation.losses if self.evaluation else ()
        acceptance = {p.draft: p.acceptance for p in self.evaluation.pairs} if losses else {}
        by_depth = {row.exit_layer: row for row in losses}
        depths = []
        for row in self.latencies:
            entry = {**asdict(row), "tokens_per_s": row.tokens_per_s}
            entry["request_ms"] = row.request_ms(self.workload.output_tokens)
            if row.num_layers in by_depth:
                loss = by_depth[row.num_layers]
                entry |= {"loss": loss.loss, "acceptance": acceptance.get(loss.tier)}
            depths.append(entry)
        return {
            "family": self.family,
            "revision": self.revision,
            "num_layers": self.num_layers,
            "target": self.target,
            "workload": asdict(self.workload),
            "depths": depths,
            "wanted": [{"reason": reason, "depth": depth} for reason, depth in self.wanted],
            "exits": list(self.proposal.exits),
            "tiers": self.proposal.to_tiers(),
            "group_size": self.proposal.group_size,
        }


def wanted_depths(
    latencies: Sequence[DepthLatency],
    workload: Workload,
    *,
    like: Sequence[tuple[str, DepthLatency]] = (),
    tokens_per_s: Sequence[float] = (),
) -> tuple[tuple[str, float], ...]:
    """The paper's rule: (why, depth) for each model to be as fast as, and each speed wanted.

    A model's time is that of the workload's whole request; a speed is that of decoding. A depth is
    0 where not even one layer is so fast, and the whole where the whole is.
    """
    depths = [row.num_layers for row in latencies]
    request_ms = [row.request_ms(workload.output_tokens) for row in latencies]
    whole = LatencyLine.fit(depths, request_ms)
    decode = LatencyLine.fit(depths, [row.decode_ms for row in latencies])
    found = [
        (f"as fast as {name}", whole.depth(row.request_ms(workload.output_tokens)))
        for name, row in like
    ]
    found += [(f"{speed:g} tokens/s", decode.depth(1000 / speed)) for speed in tokens_per_s]
    whole_depth = float(depths[-1])
    return tuple((reason, min(d, whole_depth) if d >= 1 else 0.0) for reason, d in found)


def plot_profile(profile: Profile, path: Path) -> None:
    """Latency and loss over depth, the proposed exits as vertical lines."""
    figure, axes = load_pyplot().subplots(figsize=(7, 4))
    depths = [row.num_layers for row in profile.latencies]
    axes.plot(depths, [row.decode_ms for row in profile.latencies], "o-", color="tab:blue")
    axes.set_xlabel("layers")
    axes.set_ylabel("ms per decoded token", color="tab:blue")
    axes.set_ylim(bottom=0)
    if profile.evaluation is not None:
        other = axes.twinx()
        losses = profile.evaluation.losses
        other.plot(
            [row.exit_layer for row in losses], [row.loss for row in losses], "s--", color="tab:red"
        )
        other.set_ylabel("held-out loss, nats per token", color="tab:red")
    for name, layer in zip(profile.proposal.names, profile.proposal.exits, strict=True):
        axes.axvline(layer, color="grey", linestyle=":")
        axes.annotate(name, (layer, 0), (2, 4), textcoords="offset points", rotation=90)
    save_figure(figure, path)


def _core(scratch: Path, workload: Workload, target: str) -> EngineCore:
    """An engine with room for the workload, from the family in `scratch`."""
    spec = WeightStore(scratch / "family").spec
    length = workload.prompt_tokens + workload.output_tokens
    room = kv_nbytes_per_layer(spec.model, item_size("float32")) * spec.model.num_layers
    config = BuildConfig(
        target=target,
        memory_nbytes=max(_ARENA_NBYTES, _SPARE_REQUESTS * (length + 32) * room),
        limits=EngineLimits(1, workload.prompt_tokens, length),
    )
    return load_core(build_engine(scratch / "family", scratch / "engine", config))
