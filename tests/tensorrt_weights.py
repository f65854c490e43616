"""Weights of a network definition in types that numpy lacks, as the library holds them."""

import ctypes

import tensorrt_rtx_bindings as trt
import torch
from torch import Tensor

_OBJECT_HEAD_NBYTES = 16  # a Python object's reference count and type


class _Weights(ctypes.Structure):
    """`nvinfer1::Weights` of NvInferRuntime.h."""

    _fields_ = (("type", ctypes.c_int32), ("values", ctypes.c_void_p), ("count", ctypes.c_int64))


def stored_weights(weights: trt.Weights, count: int) -> Tensor:
    """[count]: float8_e4m3fn or bfloat16 as they are, INT4 as int8.

    The bindings hand out no buffer of these types; behind their object's head is a pointer to the
    library's own structure.
    """
    address = ctypes.c_void_p.from_address(id(weights) + _OBJECT_HEAD_NBYTES).value
    held = _Weights.from_address(address)
    assert (held.type, held.count) == (int(weights.dtype), weights.size) and held.count == count
    if weights.dtype == trt.DataType.INT4:
        packed = _read(held.values, count // 2, torch.uint8)
        # Two a byte, the first in the low four bits, each a two's complement.
        nibbles = torch.stack([packed & 15, packed >> 4], dim=1).reshape(-1).to(torch.int8)
        return torch.where(nibbles > 7, nibbles - 16, nibbles)
    dtype = {trt.DataType.FP8: torch.float8_e4m3fn, trt.DataType.BF16: torch.bfloat16}
    return _read(held.values, count, dtype[weights.dtype])


def _read(address: int, count: int, dtype: torch.dtype) -> Tensor:
    memory = (ctypes.c_byte * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).clone()
