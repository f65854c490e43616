"""BuildConfig: what a build is asked for, checked before any work."""

import re
from dataclasses import dataclass

from mfs_trt.engine.interface import EngineLimits
from mfs_trt.errors import ConfigError

TARGETS = ("reference",)
PLANNED_TARGETS = ("openvino", "tensorrt", "tensorrt-rtx", "cuda")
ITEM_SIZES = {"float32": 4, "bfloat16": 2, "float64": 8}  # dtypes to compute in: bytes per element
GIB = 1 << 30


@dataclass(frozen=True)
class BuildConfig:
    """Settings of one build; raises `ConfigError` naming the setting, the choice and the value."""

    target: str = "reference"
    dtype: str = "float32"
    block_size: int = 32  # tokens per block
    memory_nbytes: int = GIB  # of the KV arena
    limits: EngineLimits = EngineLimits()

    def __post_init__(self) -> None:
        if self.target in PLANNED_TARGETS:
            raise ConfigError(
                f"target: {self.target!r} is not built by this version; "
                f"expected {', '.join(TARGETS)}"
            )
        if self.target not in TARGETS:
            raise ConfigError(f"target: expected {', '.join(TARGETS)}, got {self.target!r}")
        if self.dtype not in ITEM_SIZES:
            raise ConfigError(f"dtype: expected one of {', '.join(ITEM_SIZES)}, got {self.dtype!r}")
        positive = {
            "block_size": self.block_size,
            "memory": self.memory_nbytes,
            "max_num_seqs": self.limits.max_num_seqs,
            "max_num_batched_tokens": self.limits.max_num_batched_tokens,
            "max_model_len": self.limits.max_model_len,
        }
        for name, value in positive.items():
            if value < 1:
                raise ConfigError(f"{name}: expected at least 1, got {value}")


def parse_nbytes(text: str) -> int:
    """'512MiB', '2GiB' or a plain number of bytes → bytes; raises `ConfigError`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(B|KiB|MiB|GiB|TiB)?", text.strip())
    if not match:
        raise ConfigError(f"memory: expected a size such as 512MiB or 2GiB, got {text!r}")
    power = ("B", "KiB", "MiB", "GiB", "TiB").index(match[2] or "B")
    return int(float(match[1]) * 1024**power)
