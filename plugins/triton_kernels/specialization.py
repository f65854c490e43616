"""Specialization: one kernel with its types and constants fixed, ready to launch or to compile."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

# Our names of element types: torch's dtype, OpenAI Triton's name.
_DTYPES = {
    "float16": (torch.float16, "fp16"),
    "bfloat16": (torch.bfloat16, "bf16"),
    "float32": (torch.float32, "fp32"),
}
DTYPE_NAMES = tuple(_DTYPES)
FLOAT32 = "*fp32"
INDEX = "*i32"
INTEGER = "i32"


@dataclass(frozen=True)
class Specialization:
    """`parameters` are those that remain at run time, in the kernel's order: name → type.

    A pointer is `*fp16`, `*i32`, …; an integer `i32`. Pointers are aligned to 16 bytes.
    """

    kernel: Any  # what `triton.jit` made of the function
    parameters: Mapping[str, str]
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 2

    def launch(self, grid: tuple[int, ...], *arguments: Any) -> None:
        """Run on the arguments' device; one argument for each parameter, in their order."""
        assert len(arguments) == len(self.parameters), (len(arguments), list(self.parameters))
        if 0 in grid:
            return
        named = dict(zip(self.parameters, arguments, strict=True))
        settings = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        self.kernel[grid](**named, **self.constants, **settings)


def pointer(dtype: str) -> str:
    """`float16` → `*fp16`."""
    return "*" + _DTYPES[dtype][1]


def dtype_name(dtype: torch.dtype) -> str:
    """torch's dtype → our name; raises `ValueError` for one that the kernels do not compute in."""
    for name, (known, _) in _DTYPES.items():
        if known is dtype:
            return name
    raise ValueError(f"dtype: expected one of {', '.join(_DTYPES)}, got {dtype}")


def dot_precision(dtype: str) -> str:
    """How products of this type are formed: fp32 is not to be cut to tf32."""
    return "ieee" if dtype == "float32" else "tf32"


def check_contiguous(**tensors: torch.Tensor) -> None:
    """Raises `ValueError` naming the tensor that is not dense in row-major order."""
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: expected a contiguous tensor, got strides {tensor.stride()}")


def check_index(**tensors: torch.Tensor) -> None:
    """Raises `ValueError` naming the tensor that is not dense int32."""
    for name, tensor in tensors.items():
        if tensor.dtype is not torch.int32:
            raise ValueError(f"{name}: expected int32, got {tensor.dtype}")
    check_contiguous(**tensors)
