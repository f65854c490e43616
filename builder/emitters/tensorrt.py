"""TensorRtEmitter: the description as an `INetworkDefinition`, of native layers only.

The module is a parameter: TensorRT and TensorRT-RTX have the same network API.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from mfs_trt.dtypes import torch_dtype
from mfs_trt.engine.interface import KVCacheSpec
from mfs_trt.engine.tensorrt_api import TensorRtApi
from mfs_trt.errors import FamilyError
from mfs_trt.family.spec import FamilySpec
from mfs_trt.weights.store import WeightStore

Tensor = Any  # ITensor of the module


class TensorRtEmitter:
    """Fills one strongly typed network; weights and computation in `dtype`, norms in fp32.

    Inputs of attention, next to the description's, are those of `engine.tensorrt_inputs` and the
    arena's `key_cache.{group}.{index}`, `value_cache.{group}.{index}`, whose new content is the
    output `new_key_cache…` at the same address. The embedding is an input of its own name.
    """

    def __init__(
        self,
        api: TensorRtApi,
        network: Any,
        family: FamilySpec,
        store: WeightStore,
        dtype: str,
        kv_spec: KVCacheSpec,
    ) -> None:
        """`kv_spec.num_frames` counts the scratch frames as well."""
        self.network = network
        self._trt, self._api = api.module, api
        self._family, self._store, self._kv_spec = family, store, kv_spec
        self._dtype, self._dtype_name = api.dtype(dtype), dtype
        self._inputs: dict[str, Tensor] = {}
        self._weights: dict[str, Tensor] = {}
        self._masks: dict[int | None, Tensor] = {}  # by window
        self._existing: Tensor = None  # what `_existing_keys` gave
        self._tables: list[Tensor] = []
        self._kept: list[torch.Tensor] = []  # TensorRT reads weights where they lie

    # -- inputs, outputs, constants --------------------------------------------------------------

    def input(self, name: str, dtype: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self._inputs:
            kind = self._dtype if dtype == "activation" else self._api.dtype(dtype)
            self._inputs[name] = self.network.add_input(name, kind, shape)
        return self._inputs[name]

    def output(self, name: str, tensor: Tensor) -> None:
        tensor.name = name
        self.network.mark_output(tensor)

    def weight(self, name: str) -> Tensor:
        if name not in self._weights:
            tensor = self._store.get(name).to(torch_dtype(self._dtype_name)).contiguous()
            if not bool(tensor.isfinite().all()):
                raise FamilyError(
                    f"{name}: expected weights that are finite in {self._dtype_name}, "
                    "got nan or infinite ones"
                )
            self._weights[name] = self._constant(tensor)
        return self._weights[name]

    def table(self, values: np.ndarray) -> Tensor:
        tensor = self._constant(torch.from_numpy(np.ascontiguousarray(values, np.float32)))
        self._tables.append(tensor)
        return tensor

    def _constant(self, tensor: torch.Tensor) -> Tensor:
        self._kept.append(tensor)
        dtype = self._api.dtype(str(tensor.dtype).removeprefix("torch."))
        weights = self._trt.Weights(dtype, tensor.data_ptr(), tensor.numel())
        return self.network.add_constant(tuple(tensor.shape), weights).get_output(0)

    def _scalar(self, value: float, dtype: torch.dtype, rank: int) -> Tensor:
        return self._constant(torch.full((1,) * rank, value, dtype=dtype))

    # -- operations ------------------------------------------------------------------------------

    def embedding(self, name: str, ids: Tensor) -> Tensor:
        """From an input: a tied LM head has the only constant copy."""
        return self.gather_rows(self.input(name, "activation", self._store.shape(name)), ids)

    def gather_rows(self, table: Tensor, rows: Tensor) -> Tensor:
        """Rows of a table in full precision become activations."""
        gathered = self._gather(table, rows)
        return self._cast(gathered, self._dtype) if self._is_table(table) else gathered

    def source_rows(self, below: Tensor, features: Tensor, rows: Tensor) -> Tensor:
        kinds = self._trt.ElementWiseOperation
        zero, minus_one = (self._scalar(v, torch.int32, 1) for v in (0, -1))
        is_kept = self._elementwise(rows, zero, kinds.LESS)
        from_below = self._gather(below, self._elementwise(rows, zero, kinds.MAX))
        slots = self._elementwise(self._elementwise(minus_one, rows, kinds.SUB), zero, kinds.MAX)
        kept = self._gather(features, slots)
        condition = self._shuffle(is_kept, shape=(-1, 1))
        return self.network.add_select(condition, kept, from_below).get_output(0)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        kinds = self._trt.MatrixOperation
        layer = self.network.add_matrix_multiply(x, kinds.NONE, weight, kinds.TRANSPOSE)
        y = layer.get_output(0)
        return y if bias is None else self.add(y, self._shuffle(bias, shape=(1, -1)))

    def linears(
        self, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
    ) -> list[Tensor]:
        """Products of their own: TensorRT joins those that share an input."""
        pairs = zip(weights, biases, strict=True)
        return [self.linear(x, weight, bias) for weight, bias in pairs]

    def rms_norm(self, x: Tensor, gain: Tensor, eps: float) -> Tensor:
        kinds, rank = self._trt.ElementWiseOperation, len(x.shape)
        wide = self._cast(x, self._trt.DataType.FLOAT)
        square = self._elementwise(wide, wide, kinds.PROD)
        mean = self.network.add_reduce(
            square, self._trt.ReduceOperation.AVG, 1 << (rank - 1), True
        ).get_output(0)
        shifted = self._elementwise(mean, self._scalar(eps, torch.float32, rank), kinds.SUM)
        root = self.network.add_unary(shifted, self._trt.UnaryOperation.SQRT).get_output(0)
        scaled = self._cast(self._elementwise(wide, root, kinds.DIV), self._dtype)
        if len(gain.shape) < rank:
            gain = self._shuffle(gain, shape=(*(1,) * (rank - 1), -1))
        return self._elementwise(scaled, gain, kinds.PROD)

    def split_heads(self, x: Tensor, num_heads: int) -> Tensor:
        return self._shuffle(x, shape=(-1, num_heads, self._family.model.head_dim))

    def merge_heads(self, x: Tensor) -> Tensor:
        return self._shuffle(x, shape=(-1, x.shape[1] * x.shape[2]))

    def rotary_embedding(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """As one sequence [1, heads, num_rows, d] with a cosine and sine for each row."""
        num_heads, head_dim = x.shape[1], x.shape[2]
        sequence = self._shuffle(x, shape=(1, -1, num_heads, head_dim), after=(0, 2, 1, 3))
        cos, sin = (self._shuffle(t, shape=(1, -1, head_dim // 2)) for t in (cos, sin))
        layer = self.network.add_rotary_embedding(sequence, cos, sin, False, head_dim)
        return self._shuffle(
            layer.get_output(0), before=(0, 2, 1, 3), shape=(-1, num_heads, head_dim)
        )

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        product = self._trt.ElementWiseOperation.PROD
        layer = self.network.add_activation(gate, self._trt.ActivationType.SIGMOID)
        return self._elementwise(self._elementwise(gate, layer.get_output(0), product), up, product)

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        return self._elementwise(a, b, self._trt.ElementWiseOperation.SUM)

    # -- attention -------------------------------------------------------------------------------

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
        trt, model = self._trt, self._family.model
        where = f"{group}.{index_in_group}"
        keys, values = (
            self._written_context(f"{kind}.{where}", rows, group)
            for kind, rows in (("key_cache", key), ("value_cache", value))
        )
        scale = self._scalar(model.head_dim**-0.5, torch_dtype(self._dtype_name), 2)
        scaled = self._elementwise(query, scale, trt.ElementWiseOperation.PROD)
        heads = self.split_heads(scaled, model.num_heads)
        lanes = self._gather(heads, self.input("lane_rows", "int32", (-1, -1)))
        mask = self._mask(window)
        attention = self.network.add_attention_v2(
            self._shuffle(lanes, before=(0, 2, 1, 3)),
            keys,
            values,
            trt.AttentionNormalizationOp.SOFTMAX,
            trt.CausalMaskKind.NONE,
        )
        attention.mask = mask
        attention.decomposable = True
        width = model.num_heads * model.head_dim
        padded = self._shuffle(attention.get_output(0), before=(0, 2, 1, 3), shape=(-1, width))
        return self._gather(padded, self.input("row_queries", "int32", (-1,)))

    def _written_context(self, cache_name: str, rows: Tensor, group: int) -> Tensor:
        """Store rows [num_rows, kv_heads * d]; every lane's context [lanes, kv_heads, keys, d].

        What a frame still holds of others' tokens is taken as zero: a mask leaves nan as it is.
        """
        trt, spec = self._trt, self._kv_spec
        shape = (spec.num_frames, spec.num_kv_heads, spec.block_size, spec.head_dim)
        order = self.input(f"rows_by_frame.{group}", "int32", (-1,))
        update = self.network.add_kv_cache_update(
            self.input(cache_name, "activation", shape),
            self._gather(self.split_heads(rows, spec.num_kv_heads), order),
            self.input(f"frame_offsets.{group}", "int32", (spec.num_frames,)),
            trt.KVCacheMode.LINEAR,
        )
        update.update_form = trt.AttentionIOForm.PACKED_NHD
        update.update_lengths = self.input(
            f"frame_row_starts.{group}", "int32", (spec.num_frames + 1,)
        )
        written = update.get_output(0)
        self.output(f"new_{cache_name}", written)
        blocks = self._gather(written, self.input(f"block_tables.{group}", "int32", (-1, -1)))
        context = self._shuffle(blocks, before=(0, 2, 1, 3, 4), shape=(0, 0, -1, spec.head_dim))
        zero = self._scalar(0, torch_dtype(self._dtype_name), 4)
        return self.network.add_select(self._existing_keys(), context, zero).get_output(0)

    def _existing_keys(self) -> Tensor:
        """[lanes, 1, keys, 1] bool: keys that the lane's request has."""
        if self._existing is None:
            keys = self._shuffle(self._key_positions(), shape=(1, 1, -1, 1))
            ends = self._shuffle(self.input("lane_lengths", "int32", (-1,)), shape=(-1, 1, 1, 1))
            less = self._trt.ElementWiseOperation.LESS
            self._existing = self._elementwise(keys, ends, less)
        return self._existing

    def _key_positions(self) -> Tensor:
        return self.input("key_positions", "int32", (-1,))

    def _mask(self, window: int | None) -> Tensor:
        """[lanes, 1, width, keys] bool: keys at most at the query's position, inside its window."""
        if window not in self._masks:
            kinds = self._trt.ElementWiseOperation
            queries = self._shuffle(
                self.input("lane_positions", "int32", (-1, -1)), shape=(0, 1, -1, 1)
            )
            keys = self._shuffle(self._key_positions(), shape=(1, 1, 1, -1))
            later = self._elementwise(keys, queries, kinds.GREATER)
            mask = self.network.add_unary(later, self._trt.UnaryOperation.NOT).get_output(0)
            if window is not None:
                width = self._scalar(window, torch.int32, 4)
                begin = self._elementwise(queries, width, kinds.SUB)
                inside = self._elementwise(keys, begin, kinds.GREATER)
                mask = self._elementwise(mask, inside, kinds.AND)
            self._masks[window] = mask
        return self._masks[window]

    # -- layers ----------------------------------------------------------------------------------

    def _is_table(self, tensor: Tensor) -> bool:
        return any(tensor is table for table in self._tables)

    def _cast(self, x: Tensor, dtype: Any) -> Tensor:
        return x if x.dtype == dtype else self.network.add_cast(x, dtype).get_output(0)

    def _gather(self, x: Tensor, rows: Tensor) -> Tensor:
        return self.network.add_gather(x, rows, 0).get_output(0)

    def _elementwise(self, a: Tensor, b: Tensor, kind: Any) -> Tensor:
        return self.network.add_elementwise(a, b, kind).get_output(0)

    def _shuffle(
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
