"""BuildConfig: what a build is asked for, checked before any work."""

import re
from dataclasses import dataclass

from mfs_trt.builder.weight_formats import WEIGHT_FORMATS, check_gpus
from mfs_trt.engine.interface import EngineLimits
from mfs_trt.errors import ConfigError

TARGETS = ("openvino", "reference", "tensorrt", "tensorrt-rtx", "tensorrt-llm", "cuda")
GIB = 1 << 30

# Per target, what each setting may be; the empty string is "the same as dtype".
_CHOICES: dict[str, dict[str, tuple[str | int, ...]]] = {
    "reference": {
        "dtype": ("float32", "bfloat16", "float64"),
        "kv_dtype": ("",),
        "weight_format": ("",),
        "attention": ("",),
    },
    "openvino": {
        "dtype": ("float32", "bfloat16"),
        "kv_dtype": ("", "float32", "bfloat16", "uint8"),
        "weight_format": ("", "int8", "int4"),
        "attention": ("",),
        "block_size": (32,),  # the only one that OpenVINO's CPU plugin takes
    },
    **{
        target: {
            "dtype": ("float16", "bfloat16", "float32"),
            "kv_dtype": ("",),
            "weight_format": weight_formats,
            "attention": attention,
        }
        for target, weight_formats, attention in (
            ("tensorrt", ("", *WEIGHT_FORMATS), ("", "portable", "plugin")),
            ("tensorrt-rtx", ("", *WEIGHT_FORMATS), ("", "portable")),
            ("cuda", ("",), ("",)),
        )
    },
    "tensorrt-llm": {
        "dtype": ("float16", "bfloat16"),
        "kv_dtype": ("",),
        "weight_format": ("",),
        "attention": ("",),
    },
}

# Why a target does not take what others do, where that is not plain.
_REASONS = {("tensorrt-rtx", "attention"): "networks of tensorrt_rtx_bindings take no plugins"}


@dataclass(frozen=True)
class BuildConfig:
    """Settings of one build; raises `ConfigError` naming the setting, the choice and the value."""

    target: str = "openvino"
    dtype: str = "float32"
    block_size: int = 32  # tokens per block
    memory_nbytes: int = GIB  # of the KV arena
    limits: EngineLimits = EngineLimits()
    kv_dtype: str = ""  # dtype when empty; openvino also: uint8
    weight_format: str = ""  # dtype when empty; int8, int4; tensorrt, tensorrt-rtx: fp8
    compute_capabilities: tuple[str, ...] = ()  # tensorrt-rtx: sm80, …; its own choice when empty
    attention: str = ""  # tensorrt: portable, plugin; plugin where the module can when empty

    def __post_init__(self) -> None:
        if self.target not in TARGETS:
            raise ConfigError(f"target: expected {', '.join(TARGETS)}, got {self.target!r}")
        for name, known in _CHOICES[self.target].items():
            value = getattr(self, name)
            if value not in known:
                expected = ", ".join(str(k) for k in known if k) or "none"
                reason = _REASONS.get((self.target, name))
                raise ConfigError(
                    f"{name}: expected {expected} for target {self.target}, got {value!r}"
                    + (f" ({reason})" if reason else "")
                    + _targets_that_take(name, value)
                )
        if self.target == "openvino" and self.kv_dtype not in ("", self.dtype, "uint8"):
            raise ConfigError(
                f"kv_dtype: expected {self.dtype}, as dtype, or uint8 for target openvino, "
                f"got {self.kv_dtype!r}"
            )
        self._check_compute_capabilities()
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

    def _check_compute_capabilities(self) -> None:
        """Of GPUs that are not here only TensorRT-RTX builds plans."""
        given = ", ".join(self.compute_capabilities)
        if given and self.target != "tensorrt-rtx":
            raise ConfigError(
                f"compute_capabilities: expected none for target {self.target}, got {given}; "
                "target tensorrt-rtx builds for GPUs that are not here"
            )
        for name in self.compute_capabilities:
            if not re.fullmatch(r"sm\d{2,3}", name):
                raise ConfigError(f"compute_capabilities: expected names as sm86, got {name!r}")
        if self.target == "tensorrt-rtx":
            check_gpus(self.weight_format, self.target, self.compute_capabilities)


def _targets_that_take(name: str, value: str | int) -> str:
    """The end of a refusal: who takes what was asked for."""
    targets = [t for t, choices in _CHOICES.items() if value in choices.get(name, ())]
    return f"; {', '.join(targets)} can" if targets else ""


def parse_nbytes(text: str) -> int:
    """'512MiB', '2GiB' or a plain number of bytes → bytes; raises `ConfigError`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(B|KiB|MiB|GiB|TiB)?", text.strip())
    if not match:
        raise ConfigError(f"memory: expected a size such as 512MiB or 2GiB, got {text!r}")
    power = ("B", "KiB", "MiB", "GiB", "TiB").index(match[2] or "B")
    return int(float(match[1]) * 1024**power)
