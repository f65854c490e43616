"""One build from start to manifest."""

import os
import shutil
import tempfile
from pathlib import Path

from mfs_trt.builder.config import ITEM_SIZES, BuildConfig
from mfs_trt.engine.manifest import MANIFEST_NAME, EngineManifest
from mfs_trt.errors import ConfigError, EngineError
from mfs_trt.family.spec import FamilySpec, load_family
from mfs_trt.model.rope import max_exact_positions


def build_engine(family_dir: Path | str, out: Path | str, config: BuildConfig) -> Path:
    """Write the engine folder `out` for the family; returns it.

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
    )
    manifest.kv_spec(family, ITEM_SIZES[config.dtype])
    if out.exists() and not _is_replaceable(out):
        raise EngineError(f"{out}: expected an empty or an engine folder, got something else")
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        manifest.save(temporary)
        if out.exists():
            shutil.rmtree(out)
        os.rename(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return out


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
