"""BuildConfig: what a build is asked for, checked before any work."""

import re
from dataclasses import dataclass

from mfs_trt.engine.interface import EngineLimits
from mfs_trt.errors import ConfigError

TARGETS = ("openvino", "reference")
PLANNED_TARGETS = ("tensorrt", "tensorrt-rtx", "cuda")
ITEM_SIZES = {"float32": 4, "bfloat16": 2, "float64": 8}  # dtypes to compute in: bytes per element
GIB = 1 << 30

# Per target, what each setting may be; the empty string is "the same as dtype".
_CHOICES: dict[str, dict[str, tuple[str | int, ...]]] = {
    "reference": {
        "dtype": tuple(ITEM_SIZES),
        "kv_dtype": ("",),
        "weight_format": ("",),
    },
    "openvino": {
        "dtype": ("float32", "bfloat16"),
        "kv_dtype": ("", "float32", "bfloat16", "uint8"),
        "weight_format": ("", "int8", "int4"),
        "block_size": (32,),  # the only one that OpenVINO's CPU plugin takes
    },
}


@dataclass(frozen=True)
class BuildConfig:
    """Settings of one build; raises `ConfigError` naming the setting, the choice and the value."""

    target: str = "openvino"
    dtype: str = "float32"
    block_size: int = 32  # tokens per block
    memory_nbytes: int = GIB  # of the KV arena
    limits: EngineLimits = EngineLimits()
    kv_dtype: str = ""  # dtype when empty; openvino also: uint8
    weight_format: str = ""  # dtype when empty; openvino: int8, int4

    def __post_init__(self) -> None:
        if self.target in PLANNED_TARGETS:
            raise ConfigError(
                f"target: {self.target!r} is not built by this version; "
                f"expected {', '.join(TARGETS)}"
            )
        if self.target not in TARGETS:
            raise ConfigError(f"target: expected {', '.join(TARGETS)}, got {self.target!r}")
        for name, known in _CHOICES[self.target].items():
            if getattr(self, name) not in known:
                expected = ", ".join(str(k) for k in known if k)
                raise ConfigError(
                    f"{name}: expected {expected} for target {self.target}, "
                    f"got {getattr(self, name)!r}"
                )
        if self.target == "openvino" and self.kv_dtype not in ("", self.dtype, "uint8"):
            raise ConfigError(
                f"kv_dtype: expected {self.dtype}, as dtype, or uint8 for target openvino, "
                f"got {self.kv_dtype!r}"
            )
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
