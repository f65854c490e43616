"""One build from start to manifest."""

import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from mfs_trt.builder.config import BuildConfig
from mfs_trt.dtypes import item_size
from mfs_trt.engine.manifest import MANIFEST_NAME, EngineManifest
from mfs_trt.engine.tensorrt_api import TARGETS as TENSORRT_TARGETS
from mfs_trt.errors import ConfigError, EngineError
from mfs_trt.family.spec import FamilySpec, load_family
from mfs_trt.model.rope import max_exact_positions
from mfs_trt.weights.store import WeightStore


def build_engine(
    family_dir: Path | str,
    out: Path | str,
    config: BuildConfig,
    on_plan: Callable[[str], None] = lambda name: None,
    on_phase: Callable[[str, float], None] = lambda phase, share: None,
) -> Path:
    """Write the engine folder `out` for the family; returns it. `on_plan` hears of each plan built,
    `on_phase` of what TensorRT does meanwhile and which share of it is done.

    Replaces an engine folder, and nothing else. Raises `FamilyError`, `EngineError` or
    `ConfigError`.
    """
    family_dir, out = Path(family_dir).resolve(), Path(out)
    family = load_family(family_dir)
    _check_context(family, config)
    manifest = EngineManifest(
        target=config.target,
        family=str(family_dir),
        family_revision=family.revision,
        dtype=config.dtype,
        block_size=config.block_size,
        memory_nbytes=config.memory_nbytes,
        limits=config.limits,
        kv_dtype=config.kv_dtype,
        weight_format=config.weight_format,
    )
    # 8-bit caches hold scales as well, whose size the compiled plan knows: loading counts them.
    itemsize = 1 if config.kv_dtype == "uint8" else item_size(config.kv_dtype or config.dtype)
    manifest.kv_spec(family, manifest.layer_nbytes(family, itemsize))
    if out.exists() and not _is_replaceable(out):
        raise EngineError(f"{out}: expected an empty or an engine folder, got something else")
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        if config.target == "openvino":
            manifest = _with_openvino_plans(manifest, family, config, temporary, on_plan)
        elif config.target in TENSORRT_TARGETS:
            manifest = _with_tensorrt_plans(manifest, family, config, temporary, on_plan, on_phase)
        manifest.save(temporary)
        if out.exists():
            shutil.rmtree(out)
        os.rename(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return out


def _with_openvino_plans(
    manifest: EngineManifest,
    family: FamilySpec,
    config: BuildConfig,
    folder: Path,
    on_plan: Callable[[str], None],
) -> EngineManifest:
    import openvino

    from mfs_trt.builder.openvino import build_plans

    store = WeightStore(manifest.family)
    plans = build_plans(family, store, config, folder, on_plan)
    return replace(manifest, plans=plans, backend_version=openvino.__version__)


def _with_tensorrt_plans(
    manifest: EngineManifest,
    family: FamilySpec,
    config: BuildConfig,
    folder: Path,
    on_plan: Callable[[str], None],
    on_phase: Callable[[str, float], None],
) -> EngineManifest:
    from mfs_trt.builder.tensorrt import build_plans, built_for, load_target
    from mfs_trt.builder.tensorrt_ways import choose_way

    api = load_target(config)
    gpus = built_for(api, config)
    way = choose_way(api, family, config, gpus)
    kv_spec = manifest.kv_spec(family, manifest.layer_nbytes(family, item_size(config.dtype)))
    store = WeightStore(manifest.family)
    plans = build_plans(api, family, store, config, kv_spec, way, folder, on_plan, on_phase)
    return replace(
        manifest,
        plans=plans,
        backend_version=api.version,
        compute_capabilities=gpus,
        attention=way.name,
    )


def _is_replaceable(folder: Path) -> bool:
    if not folder.is_dir():
        return False
    return (folder / MANIFEST_NAME).exists() or not any(folder.iterdir())


def _check_context(family: FamilySpec, config: BuildConfig) -> None:
    """Refuse a context that the model's rotary embedding cannot serve exactly."""
    limit = max_exact_positions(family.model)
    if limit is not None and config.limits.max_model_len > limit:
        raise ConfigError(
            f"max_model_len: expected at most {limit} for rope_scaling "
            f"{family.model.rope.scaling_type!r}, got {config.limits.max_model_len}"
        )
