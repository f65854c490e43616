"""CheckpointReader: what every source format offers to the conversion; checks of its tensors."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch

from mfs_trt.errors import CheckpointError
from mfs_trt.model_config import ModelConfig
from mfs_trt.tensor_names import tensor_shapes

Shape = tuple[int, ...]
_MAX_NAMED = 8  # names listed in an error before it says "and N more"


class CheckpointReader(Protocol):
    """An opened checkpoint whose tensors were checked against its config."""

    source: str  # for people
    config: ModelConfig
    dtype: str  # the dtype that loses nothing: float32, float16, bfloat16
    end_token_ids: tuple[int, ...]

    def load(self, name: str) -> torch.Tensor:
        """The tensor of that name (see `tensor_names`), in whatever dtype it is stored."""
        ...

    def write_tokenizer(self, folder: Path) -> bool:
        """Write tokenizer files for transformers.AutoTokenizer; False when there are none."""
        ...


def check_tensors(found: Mapping[str, Shape], config: ModelConfig, source: str) -> None:
    """Raise `CheckpointError` unless `found` (our names → shapes) is what `config` implies."""
    check_shapes(found, tensor_shapes(config), source)


def check_shapes(found: Mapping[str, Shape], expected: Mapping[str, Shape], source: str) -> None:
    """Raise `CheckpointError` naming every tensor that is missing, unknown or of another shape."""
    missing = [f"{name} {list(shape)}" for name, shape in expected.items() if name not in found]
    extra = [f"{name} {list(shape)}" for name, shape in found.items() if name not in expected]
    wrong = [
        f"{name}: expected {list(shape)}, got {list(found[name])}"
        for name, shape in expected.items()
        if name in found and tuple(found[name]) != tuple(shape)
    ]
    faults = {"missing tensors": missing, "unknown tensors": extra, "wrong shapes": wrong}
    texts = [f"{fault}: {_listed(names)}" for fault, names in faults.items() if names]
    if texts:
        raise CheckpointError(f"{source}: {'. '.join(texts)}")


def _listed(items: list[str]) -> str:
    rest = len(items) - _MAX_NAMED
    return "; ".join(items[:_MAX_NAMED]) + (f"; and {rest} more" if rest > 0 else "")
