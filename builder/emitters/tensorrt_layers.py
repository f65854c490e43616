"""TensorRtLayers: a TensorRT network, and the layers that every part of a description is made of.

The module is a parameter: TensorRT and TensorRT-RTX have the same network API.
"""

from math import prod
from typing import Any

import torch

from mfs_trt.builder.quantiser import QuantisedWeight, pack_int4
from mfs_trt.dtypes import dtype_name
from mfs_trt.engine.tensorrt_api import TensorRtApi

Tensor = Any  # ITensor of the module


class TensorRtLayers:
    """Fills one strongly typed network. `dtype` is that of weights and activations."""

    def __init__(self, api: TensorRtApi, network: Any, dtype: str) -> None:
        self.trt, self.api, self.network = api.module, api, network
        self.dtype, self.dtype_name = api.dtype(dtype), dtype
        self._inputs: dict[str, Tensor] = {}
        self._kept: list[torch.Tensor] = []  # TensorRT reads weights where they lie

    def input(self, name: str, dtype: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self._inputs:
            kind = self.dtype if dtype == "activation" else self.api.dtype(dtype)
            self._inputs[name] = self.network.add_input(name, kind, shape)
        return self._inputs[name]

    def output(self, name: str, tensor: Tensor) -> None:
        tensor.name = name
        self.network.mark_output(tensor)

    def constant(self, tensor: torch.Tensor) -> Tensor:
        return self._constant(tensor, dtype_name(tensor.dtype), tuple(tensor.shape))

    def dequantised(self, weight: QuantisedWeight) -> Tensor:
        """Stored as it is, multiplied out where it is used: [out, in]."""
        shape = tuple(weight.values.shape)
        if weight.weight_format == "int4":
            values = self._constant(pack_int4(weight.values), "int4", shape)
        else:
            values = self.constant(weight.values)
        layer = self.network.add_dequantize(values, self.constant(weight.scale), self.dtype)
        if weight.scale.dim() == 1:
            layer.axis = 0  # of output channels; blocks are known by the shape of their scales
        return layer.get_output(0)

    def _constant(self, tensor: torch.Tensor, dtype: str, shape: tuple[int, ...]) -> Tensor:
        self._kept.append(tensor)
        weights = self.trt.Weights(self.api.dtype(dtype), tensor.data_ptr(), prod(shape))
        return self.network.add_constant(shape, weights).get_output(0)

    def scalar(self, value: float, dtype: torch.dtype, rank: int) -> Tensor:
        return self.constant(torch.full((1,) * rank, value, dtype=dtype))

    def cast(self, x: Tensor, dtype: Any) -> Tensor:
        return x if x.dtype == dtype else self.network.add_cast(x, dtype).get_output(0)

    def gather(self, x: Tensor, rows: Tensor, axis: int = 0) -> Tensor:
        return self.network.add_gather(x, rows, axis).get_output(0)

    def elementwise(self, a: Tensor, b: Tensor, kind: Any) -> Tensor:
        return self.network.add_elementwise(a, b, kind).get_output(0)

    def shuffle(
        self,
        x: Tensor,
        *,
        before: tuple[int, ...] | None = None,
        shape: tuple[int, ...] | None = None,
        after: tuple[int, ...] | None = None,
    ) -> Tensor:
        """Transpose, reshape (0: the dimension as it is, -1: what is left), transpose."""
        layer = self.network.add_shuffle(x)
        if before is not None:
            layer.first_transpose = before
        if shape is not None:
            layer.reshape_dims = shape
        if after is not None:
            layer.second_transpose = after
        return layer.get_output(0)

    def gathered_exit(self, rows: Tensor, tiers: Tensor, gains: Tensor, eps: float) -> Tensor:
        """`Emitter.tier_exit` by native layers; the input `exit_rows` says which rows leave."""
        wanted = self.gather(rows, self.input("exit_rows", "int32", (-1,)))
        return self.rms_norm(wanted, self.gather(gains, tiers), eps)

    def rms_norm(self, x: Tensor, gain: Tensor, eps: float) -> Tensor:
        """Over the last dimension, in fp32."""
        kinds, rank = self.trt.ElementWiseOperation, len(x.shape)
        wide = self.cast(x, self.trt.DataType.FLOAT)
        square = self.elementwise(wide, wide, kinds.PROD)
        mean = self.network.add_reduce(
            square, self.trt.ReduceOperation.AVG, 1 << (rank - 1), True
        ).get_output(0)
        shifted = self.elementwise(mean, self.scalar(eps, torch.float32, rank), kinds.SUM)
        root = self.network.add_unary(shifted, self.trt.UnaryOperation.SQRT).get_output(0)
        scaled = self.cast(self.elementwise(wide, root, kinds.DIV), self.dtype)
        if len(gain.shape) < rank:
            gain = self.shuffle(gain, shape=(*(1,) * (rank - 1), -1))
        return self.elementwise(scaled, gain, kinds.PROD)
