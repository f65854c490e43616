"""Engines: built, loadable nested models behind one protocol."""

from pathlib import Path

from mfs_trt.engine.interface import Engine
from mfs_trt.engine.manifest import EngineManifest
from mfs_trt.engine.tensorrt_api import TARGETS as TENSORRT_TARGETS
from mfs_trt.errors import EngineError

__all__ = ["load_engine"]


def load_engine(folder: Path | str) -> Engine:
    """Load an engine folder with the implementation that its manifest names."""
    manifest = EngineManifest.load(folder)
    if manifest.target == "reference":
        from mfs_trt.engine.reference import ReferenceEngine

        return ReferenceEngine.load(manifest)
    if manifest.target == "openvino":
        from mfs_trt.engine.openvino import OpenVinoEngine

        return OpenVinoEngine.load(Path(folder), manifest)
    if manifest.target == "cuda":
        from mfs_trt.engine.cuda import CudaEngine

        return CudaEngine.load(manifest)
    if manifest.target in TENSORRT_TARGETS:
        from mfs_trt.engine.tensorrt import TensorRtEngine

        return TensorRtEngine.load(Path(folder), manifest)
    raise EngineError(
        f"{folder}: target: expected one that this version runs "
        f"(openvino, reference, cuda, {', '.join(TENSORRT_TARGETS)}), "
        f"got {manifest.target!r}"
    )
