"""Weight-only quantisation: a matrix as small numbers times scales, symmetric, without calibration.

`int8` and `fp8` (E4M3) have a scale for each output channel, `int4` one for each block of adjacent
inputs. TensorRT's rules for what it dequantises are kept: scales above zero, no zero points.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mfs_trt.errors import ConfigError

MAX_BLOCK_SIZE = 128
_LARGEST = {"int8": 127, "int4": 7, "fp8": 448}  # magnitude that a stored number reaches


@dataclass(frozen=True)
class QuantisedWeight:
    """A matrix [out, in]: `values * scale`, the scale of a row or of a block in a row."""

    weight_format: str
    values: Tensor  # [out, in] int8 (of int4: -7 to 7), or float8_e4m3fn
    scale: Tensor  # [out], of int4 [out, in / block_size]; above zero

    @property
    def block_size(self) -> int:
        """Weights that share a scale."""
        scales_per_row = 1 if self.scale.dim() == 1 else self.scale.shape[1]
        return self.values.shape[1] // scales_per_row

    def dequantised(self) -> Tensor:
        """[out, in] in the scale's dtype, each product rounded to it."""
        scale = self.scale.reshape(len(self.scale), -1)
        return self.values.to(scale.dtype) * scale.repeat_interleave(self.block_size, dim=1)


def quantise(weight: Tensor, weight_format: str, scale_dtype: torch.dtype) -> QuantisedWeight:
    """Of a finite matrix [out, in]; no stored number is further from it than half a scale.

    In `fp8` the distance is relative: 2⁻⁴ of a weight, and below 2⁻⁶ scales 2⁻¹⁰ of its scale.
    Raises `ConfigError` for `int4` where rows have an odd length.
    """
    rows, width = weight.shape
    block_size = width
    if weight_format == "int4":
        block_size = choose_block_size(width)
    blocks = weight.float().reshape(rows, width // block_size, block_size)
    largest = _LARGEST[weight_format]
    scale = _scale(blocks.abs().amax(dim=2), largest, scale_dtype)  # [out, blocks]
    scaled = (blocks / scale.float()[:, :, None]).clamp_(-largest, largest)
    if weight_format == "fp8":
        values = scaled.to(torch.float8_e4m3fn)
    else:
        values = scaled.round_().to(torch.int8)
    shape = scale.shape if weight_format == "int4" else (rows,)
    return QuantisedWeight(weight_format, values.reshape(rows, width), scale.reshape(shape))


def choose_block_size(row_length: int) -> int:
    """Weights that share a scale in 4 bits: at most 128, a power of two that divides the row."""
    block_size = min(MAX_BLOCK_SIZE, row_length & -row_length)
    if block_size == 1:
        raise ConfigError(
            f"weight_format: int4 takes rows of an even length, got {row_length}; int8 takes any"
        )
    return block_size


def pack_int4(values: Tensor) -> Tensor:
    """int8 numbers of -8 to 7, an even count → uint8, two a byte, the first in the low four bits.

    The order is ONNX's and TensorRT's.
    """
    first, second = values.reshape(-1, 2).to(torch.uint8).unbind(1)
    return (first & 15) | (second << 4)


def _scale(greatest: Tensor, largest: int, dtype: torch.dtype) -> Tensor:
    """Least scale in `dtype` with which `greatest` is within ±`largest`; 1 where all is zero."""
    exact = greatest.double() / largest
    scale = exact.to(dtype)
    bits = scale.view(torch.int32 if dtype.itemsize == 4 else torch.int16)
    next_up = (bits + 1).view(dtype)
    scale = torch.where(scale.double() < exact, next_up, scale)
    return torch.where(exact == 0, torch.ones_like(scale), scale)
