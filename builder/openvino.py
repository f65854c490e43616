"""OpenVINO plans: the description emitted, weights compressed, each plan saved as two files."""

import hashlib
import logging
from collections.abc import Callable
from functools import partial
from math import gcd
from pathlib import Path

import openvino as ov

from mfs_trt.builder.config import BuildConfig
from mfs_trt.builder.emitters.openvino import TABLE_ROWS, OpenVinoEmitter
from mfs_trt.builder.network import describe_head, describe_segment
from mfs_trt.builder.quantiser import choose_block_size
from mfs_trt.engine.manifest import PlanFile
from mfs_trt.errors import ConfigError
from mfs_trt.family.spec import FamilySpec
from mfs_trt.model_config import ModelConfig
from mfs_trt.weights.store import WeightStore


def build_plans(
    family: FamilySpec,
    store: WeightStore,
    config: BuildConfig,
    folder: Path,
    on_plan: Callable[[str], None],
) -> tuple[PlanFile, ...]:
    """Write one plan a segment and one a distinct LM head; `on_plan` hears of each."""
    plans = []
    make_emitter = partial(
        OpenVinoEmitter,
        family,
        store,
        fuses_mlp=config.dtype == "bfloat16",
        has_bf16_weights=not config.weight_format and "bfloat16" in (config.dtype, family.dtype),
    )
    for segment in family.segments:
        emitter = make_emitter()
        describe_segment(emitter, family, segment, config.limits.max_model_len)
        plans.append(_save(emitter, f"segment_{segment.index}", family, config, folder, on_plan))
    heads = dict.fromkeys(family.head_name(tier) for tier in range(len(family.tiers)))
    for i, weight_name in enumerate(heads):
        emitter = make_emitter()
        describe_head(emitter, family, weight_name)
        plans.append(_save(emitter, f"head_{i}", family, config, folder, on_plan))
    return tuple(plans)


def _save(
    emitter: OpenVinoEmitter,
    name: str,
    family: FamilySpec,
    config: BuildConfig,
    folder: Path,
    on_plan: Callable[[str], None],
) -> PlanFile:
    model = emitter.build(name)
    if config.weight_format:
        model = _compressed(model, config.weight_format, family.model)
    ov.save_model(model, folder / f"{name}.xml", compress_to_fp16=False)
    files = {}
    for suffix in ("xml", "bin"):
        path = folder / f"{name}.{suffix}"
        with path.open("rb") as file:
            files[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    on_plan(name)
    return PlanFile(name, files)


def group_size(model: ModelConfig) -> int:
    """Weights that share a scale in 4 bits, in every matrix of the model."""
    width = model.num_heads * model.head_dim
    return choose_block_size(gcd(model.hidden_size, model.intermediate_size, width))


def _compressed(model: ov.Model, weight_format: str, config: ModelConfig) -> ov.Model:
    """Weight-only quantisation by NNCF, as the peers' exporters do it: int8 by output channel."""
    try:
        import nncf
    except ImportError:
        raise ConfigError(
            f"weight_format: {weight_format} needs the package nncf "
            "(pip install 'mfs-trt[compress]')"
        ) from None
    logging.getLogger("nncf").setLevel(logging.ERROR)  # its progress is not news
    settings = {"mode": nncf.CompressWeightsMode.INT8_ASYM}
    if weight_format == "int4":
        settings = {"mode": nncf.CompressWeightsMode.INT4_SYM, "group_size": group_size(config)}
    tables = nncf.IgnoredScope(patterns=[f"{TABLE_ROWS}.*"], validate=False)
    return nncf.compress_weights(model, ignored_scope=tables, **settings)
