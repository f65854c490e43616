"""Source checkpoints: `open_checkpoint` looks inside a path and returns its format's reader."""

from pathlib import Path

from mfs_trt.checkpoint.hf import HfCheckpoint, read_json
from mfs_trt.checkpoint.reader import CheckpointReader
from mfs_trt.errors import CheckpointError

__all__ = ["CheckpointReader", "open_checkpoint"]


def open_checkpoint(path: Path | str) -> CheckpointReader:
    """Open a Hugging Face folder, a GGUF file or a TensorRT-LLM checkpoint folder.

    Raises `CheckpointError` naming what is missing, unknown or not supported.
    """
    path = Path(path)
    if path.is_file():
        from mfs_trt.checkpoint.gguf import GgufCheckpoint

        return GgufCheckpoint(path)
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such file or folder")
    if (path / "family.json").is_file():
        raise CheckpointError(f"{path}: is a family folder already, expected a checkpoint")
    if "architecture" in read_json(path / "config.json"):
        from mfs_trt.checkpoint.trtllm import TrtllmCheckpoint

        return TrtllmCheckpoint(path)
    return HfCheckpoint(path)
