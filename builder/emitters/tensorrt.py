"""TensorRtEmitter: the description as an `INetworkDefinition`.

The module is a parameter: TensorRT and TensorRT-RTX have the same network API.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from mfs_trt.builder.emitters.tensorrt_attention import AttentionFactory
from mfs_trt.builder.emitters.tensorrt_layers import Tensor, TensorRtLayers
from mfs_trt.builder.quantiser import quantise
from mfs_trt.builder.weight_formats import format_of
from mfs_trt.dtypes import torch_dtype
from mfs_trt.engine.tensorrt_api import TensorRtApi
from mfs_trt.errors import FamilyError
from mfs_trt.family.spec import FamilySpec
from mfs_trt.weights.store import WeightStore


class TensorRtEmitter(TensorRtLayers):
    """Weights and computation in `dtype`, norms in fp32; attention and exits are `attention`'s.

    The embedding is an input of its own name. Inputs and outputs of attention, next to the
    description's, are those that its file names.
    """

    def __init__(
        self,
        api: TensorRtApi,
        network: Any,
        family: FamilySpec,
        store: WeightStore,
        dtype: str,
        attention: AttentionFactory,
        weight_format: str = "",
    ) -> None:
        super().__init__(api, network, dtype)
        self._family, self._store, self._weight_format = family, store, weight_format
        self._weights: dict[str, Tensor] = {}
        self._tables: list[Tensor] = []
        self.attention = attention(self)

    # -- constants -------------------------------------------------------------------------------

    def weight(self, name: str) -> Tensor:
        if name not in self._weights:
            tensor = self._store.get(name).to(torch_dtype(self.dtype_name)).contiguous()
            if not bool(tensor.isfinite().all()):
                raise FamilyError(
                    f"{name}: expected weights that are finite in {self.dtype_name}, "
                    "got nan or infinite ones"
                )
            self._weights[name] = self._stored(name, tensor)
        return self._weights[name]

    def _stored(self, name: str, tensor: torch.Tensor) -> Tensor:
        """A weight as the build's format has it, in `dtype` where it is used."""
        weight_format = format_of(name, tensor.shape, self._weight_format)
        if not weight_format:
            return self.constant(tensor)
        return self.dequantised(quantise(tensor, weight_format, tensor.dtype))

    def table(self, values: np.ndarray) -> Tensor:
        tensor = self.constant(torch.from_numpy(np.ascontiguousarray(values, np.float32)))
        self._tables.append(tensor)
        return tensor

    # -- operations ------------------------------------------------------------------------------

    def embedding(self, name: str, ids: Tensor) -> Tensor:
        """From an input: a tied LM head has the only constant copy."""
        return self.gather_rows(self.input(name, "activation", self._store.shape(name)), ids)

    def gather_rows(self, table: Tensor, rows: Tensor) -> Tensor:
        """Rows of a table in full precision become activations."""
        gathered = self.gather(table, rows)
        return self.cast(gathered, self.dtype) if self._is_table(table) else gathered

    def source_rows(self, below: Tensor, features: Tensor, rows: Tensor) -> Tensor:
        kinds = self.trt.ElementWiseOperation
        zero, minus_one = (self.scalar(v, torch.int32, 1) for v in (0, -1))
        is_kept = self.elementwise(rows, zero, kinds.LESS)
        from_below = self.gather(below, self.elementwise(rows, zero, kinds.MAX))
        slots = self.elementwise(self.elementwise(minus_one, rows, kinds.SUB), zero, kinds.MAX)
        kept = self.gather(features, slots)
        condition = self.shuffle(is_kept, shape=(-1, 1))
        return self.network.add_select(condition, kept, from_below).get_output(0)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        kinds = self.trt.MatrixOperation
        layer = self.network.add_matrix_multiply(x, kinds.NONE, weight, kinds.TRANSPOSE)
        y = layer.get_output(0)
        return y if bias is None else self.add(y, self.shuffle(bias, shape=(1, -1)))

    def linears(self, x: Tensor, names: Sequence[str], has_bias: bool) -> list[Tensor]:
        """Products of their own: TensorRT joins those that share an input."""
        biases = [self.weight(f"{name}.bias") if has_bias else None for name in names]
        weights = [self.weight(f"{name}.weight") for name in names]
        return [self.linear(x, w, b) for w, b in zip(weights, biases, strict=True)]

    def split_heads(self, x: Tensor, num_heads: int) -> Tensor:
        return self.shuffle(x, shape=(-1, num_heads, self._family.model.head_dim))

    def merge_heads(self, x: Tensor) -> Tensor:
        return self.shuffle(x, shape=(-1, x.shape[1] * x.shape[2]))

    def rotary_embedding(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """As one sequence [1, heads, num_rows, d] with a cosine and sine for each row."""
        num_heads, head_dim = x.shape[1], x.shape[2]
        sequence = self.shuffle(x, shape=(1, -1, num_heads, head_dim), after=(0, 2, 1, 3))
        cos, sin = (self.shuffle(t, shape=(1, -1, head_dim // 2)) for t in (cos, sin))
        layer = self.network.add_rotary_embedding(sequence, cos, sin, False, head_dim)
        return self.shuffle(
            layer.get_output(0), before=(0, 2, 1, 3), shape=(-1, num_heads, head_dim)
        )

    def swiglu(self, x: Tensor, gate: str, up: str, has_bias: bool) -> Tensor:
        product = self.trt.ElementWiseOperation.PROD
        g, u = self.linears(x, [gate, up], has_bias)
        layer = self.network.add_activation(g, self.trt.ActivationType.SIGMOID)
        return self.elementwise(self.elementwise(g, layer.get_output(0), product), u, product)

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        return self.elementwise(a, b, self.trt.ElementWiseOperation.SUM)

    # -- ways of their own -----------------------------------------------------------------------

    def paged_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        group: int,
        index_in_group: int,
        window: int | None,
    ) -> Tensor:
        return self.attention.paged_attention(
            query, key, value, group=group, index_in_group=index_in_group, window=window
        )

    def tier_exit(self, rows: Tensor, tiers: Tensor, gains: Tensor, eps: float) -> Tensor:
        return self.attention.tier_exit(rows, tiers, gains, eps)

    def _is_table(self, tensor: Tensor) -> bool:
        return any(tensor is table for table in self._tables)
