"""One training from family folder to family folder."""

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from mfs_trt.checkpoint.hf import copy_tokenizer
from mfs_trt.dtypes import torch_dtype
from mfs_trt.errors import ConfigError
from mfs_trt.family.spec import FamilySpec, TierSpec
from mfs_trt.model.transformer import NestedModel
from mfs_trt.precipitation.checkpoints import Checkpoints
from mfs_trt.precipitation.config import PrecipitationConfig
from mfs_trt.precipitation.initial import freeze_untrained, merged_weights, starting_model
from mfs_trt.precipitation.packing import PackedTokens
from mfs_trt.precipitation.trainer import StepReport, Trainer
from mfs_trt.precipitation.world import World
from mfs_trt.weights.store import WeightStore
from mfs_trt.weights.writer import TensorEntry, write_family

METRICS_FILE = "metrics.jsonl"


def precipitate(
    family_dir: Path,
    out: Path,
    data: PackedTokens,
    config: PrecipitationConfig,
    world: World,
    *,
    tiers: Sequence[TierSpec],
    work: Path,
    is_random: bool = False,
    held_out: PackedTokens | None = None,
    force: bool = False,
    on_step: Callable[[StepReport], None] = lambda report: None,
) -> FamilySpec | None:
    """Train and write the family folder `out`; its spec, None in other processes than the first.

    `work` holds checkpoints and `metrics.jsonl`; a training found there goes on. `tiers`: the exits
    to train, of which the last may be below the source's depth. `is_random`: from scratch.
    """
    store = WeightStore(family_dir)
    limit = store.spec.model.max_position_embeddings
    if config.seq_length > limit:
        raise ConfigError(
            f"seq_length: expected at most the model's {limit}, got {config.seq_length}"
        )
    torch.manual_seed(config.seed)
    model = starting_model(store, tiers, is_random=is_random, seed=config.seed)
    anchor = None
    if config.anchor_weight > 0:
        if is_random or model.family.model.num_layers != store.spec.model.num_layers:
            raise ConfigError("anchor_weight: expected 0 without the family's own top tier")
        anchor = starting_model(store, tiers, is_random=False, seed=0)
        anchor.requires_grad_(False).to(world.device)
    freeze_untrained(model, config)
    model.to(world.device)
    trainer = Trainer(model, data, config, world, anchor=anchor, held_out=held_out)
    identity = f"{store.spec.revision} {'random' if is_random else ''} {_tiers_text(tiers)}"
    with ExitStack() as files:
        log = _MetricsLog(work, files) if world.is_main else None

        def report(step: StepReport) -> None:
            if log is not None:
                log.write(step)
            on_step(step)

        trainer.run(Checkpoints(work, config, identity), report)
    weights = _gathered(model)
    if not world.is_main:
        return None
    return _write(out, model, weights, store.folder, force)


class _MetricsLog:
    """`metrics.jsonl`, one line a step, and TensorBoard's files when that package is there."""

    def __init__(self, folder: Path, files: ExitStack) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = files.enter_context((folder / METRICS_FILE).open("a", encoding="utf-8"))
        self._board: Any = None
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            return
        self._board = files.enter_context(SummaryWriter(str(folder / "tensorboard")))

    def write(self, report: StepReport) -> None:
        self._file.write(json.dumps(asdict(report)) + "\n")
        self._file.flush()
        if self._board is not None:
            for kind in ("losses", "tier_weights", "held_out"):
                for tier, value in getattr(report, kind).items():
                    self._board.add_scalar(f"{kind}/{tier}", value, report.step)
            for name in ("learning_rate", "grad_norm", "tokens_per_s"):
                self._board.add_scalar(name, getattr(report, name), report.step)


def write_model(
    out: Path, model: NestedModel, tokenizer_folder: Path, *, force: bool = False
) -> FamilySpec:
    """The family folder of a model in memory, in the dtype that its spec names."""
    return _write(out, model, _gathered(model), tokenizer_folder, force)


def _gathered(model: NestedModel) -> dict[str, torch.Tensor]:
    weights = merged_weights(model)
    return {
        name: (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().cpu()
        for name, t in weights.items()
    }


def _write(
    out: Path,
    model: NestedModel,
    weights: dict[str, torch.Tensor],
    tokenizer_folder: Path,
    force: bool,
) -> FamilySpec:
    source = model.family
    dtype = torch_dtype(source.dtype)
    entries = [
        TensorEntry(name, shape, source.dtype, lambda name=name: weights[name].to(dtype))
        for name, shape in model.family.tensor_shapes().items()
    ]
    return write_family(
        out,
        model.family.model,
        model.family.tiers,
        source.dtype,
        entries,
        end_token_ids=source.end_token_ids,
        source=source.source,
        write_tokenizer=lambda folder: copy_tokenizer(tokenizer_folder, folder),
        force=force,
    )


def _tiers_text(tiers: Sequence[TierSpec]) -> str:
    return ",".join(f"{t.name}={t.exit_layer}{'+head' if t.own_head else ''}" for t in tiers)
