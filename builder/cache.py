"""Engines built on demand, kept by content: same family, settings and versions → same folder."""

import hashlib
import os
from dataclasses import asdict
from pathlib import Path

import mfs_trt
from mfs_trt.builder.build import build_engine
from mfs_trt.builder.config import BuildConfig
from mfs_trt.engine.manifest import MANIFEST_NAME as ENGINE_MANIFEST
from mfs_trt.engine.manifest import EngineManifest
from mfs_trt.engine.tensorrt_api import TARGETS as TENSORRT_TARGETS
from mfs_trt.engine.tensorrt_api import load_api
from mfs_trt.errors import EngineError
from mfs_trt.family.spec import MANIFEST_NAME as FAMILY_MANIFEST
from mfs_trt.family.spec import load_family


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/mfs-trt/engines`, by default under `~/.cache`."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "mfs-trt" / "engines"


def resolve_engine(folder: Path | str, config: BuildConfig | None = None) -> Path:
    """An engine folder as it is; a family folder built for `config`, once.

    Raises `EngineError` when `folder` is neither.
    """
    folder = Path(folder)
    if (folder / ENGINE_MANIFEST).exists():
        return folder
    if not (folder / FAMILY_MANIFEST).exists():
        raise EngineError(
            f"{folder}: expected an engine folder with {ENGINE_MANIFEST} "
            f"or a family folder with {FAMILY_MANIFEST}"
        )
    config = config or BuildConfig()
    versions = mfs_trt.__version__, _backend_version(config.target)
    key = repr((str(folder.resolve()), load_family(folder).revision, asdict(config), versions))
    out = cache_folder() / hashlib.sha256(key.encode()).hexdigest()[:16]
    if not _is_whole(out):
        build_engine(folder, out, config)
    return out


def _is_whole(engine: Path) -> bool:
    """Whether a kept engine can be used: there, and its plans as they were built."""
    try:
        for plan in EngineManifest.load(engine).plans:
            plan.check(engine)
    except EngineError:
        return False
    return True


def _backend_version(target: str) -> str:
    """Of the library whose plans another version of it does not run."""
    if target in TENSORRT_TARGETS:
        return load_api(target).version
    if target == "openvino":
        import openvino

        return openvino.__version__
    return ""
