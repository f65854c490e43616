"""OpenVinoEmitter: the description as an `ov.Model`."""

from collections.abc import Sequence

import numpy as np
import openvino as ov
import torch
from openvino import opset13 as op
from openvino.utils.node_factory import NodeFactory

from mfs_trt.engine.openvino_attention import BLOCK_SIZE, PagedAttentionCall
from mfs_trt.errors import FamilyError
from mfs_trt.family.spec import FamilySpec
from mfs_trt.weights.store import WeightStore

TABLE_ROWS = "table_rows."
_TO_THE_END = 2**31 - 1
_STORED_TYPES = {"float32": ov.Type.f32, "float16": ov.Type.f16, "bfloat16": ov.Type.bf16}
_TYPES = {"int32": ov.Type.i32, "activation": ov.Type.f32}


class OpenVinoEmitter:
    """Builds one model. Activations are computed in what compilation asks for.

    `fuses_mlp`: rows are sequences of one token inside, [num_rows, 1, width]: the rank at which
    OpenVINO runs an MLP as one operation, where the CPU multiplies bf16 matrices. Decode steps are
    3 % shorter there; in other precisions, which it does not do that for, it would cost 3 to 7 %.

    `has_bf16_weights`: matrices are stored in bf16, half the bytes; in fp32 nothing is lost where
    the family's weights are bf16 already.

    Inputs of attention, next to the description's: `past_lens` [num_reqs], `subsequence_begins`
    [num_reqs + 1], `block_indices.{group}` and `block_indices_begins`, `max_context_len`; arena
    tensors `key_cache.{group}.{index}`, `value_cache.{group}.{index}`.
    """

    def __init__(
        self,
        family: FamilySpec,
        store: WeightStore,
        *,
        fuses_mlp: bool = False,
        has_bf16_weights: bool = False,
    ) -> None:
        self._family, self._store = family, store
        self._fuses_mlp, self._has_bf16_weights = fuses_mlp, has_bf16_weights
        self._inputs: dict[str, ov.Node] = {}
        self._results: list[ov.Node] = []
        self._weights: dict[str, ov.Node] = {}
        self._tables: list[ov.Node] = []
        self._kept: list[torch.Tensor] = []

    def build(self, name: str) -> ov.Model:
        return ov.Model(self._results, list(self._inputs.values()), name)

    # -- inputs, outputs, constants --------------------------------------------------------------

    def input(self, name: str, dtype: str, shape: tuple[int, ...]) -> ov.Node:
        return self._input(name, _TYPES[dtype], shape)

    def output(self, name: str, tensor: ov.Node | ov.Output) -> None:
        result = op.result(self._lowered(tensor))
        result.output(0).set_names({name})
        self._results.append(result)

    def weight(self, name: str) -> ov.Node:
        if name not in self._weights:
            self._weights[name] = self._constant(self._finite(name))
        return self._weights[name]

    def table(self, values: np.ndarray) -> ov.Node:
        """Rows gathered from it are called `{TABLE_ROWS}…`: compression leaves those alone."""
        node = op.constant(np.ascontiguousarray(values, np.float32))
        self._tables.append(node)
        return node

    def _finite(self, name: str) -> torch.Tensor:
        tensor = self._store.get(name).float().contiguous()
        if not bool(tensor.isfinite().all()):
            raise FamilyError(f"{name}: expected finite weights, got nan or infinite ones")
        return tensor

    def _constant(self, tensor: torch.Tensor) -> ov.Node:
        """Shares the memory of `tensor`, which must outlive the model."""
        if self._has_bf16_weights and tensor.ndim == 2:
            tensor = tensor.bfloat16()
            self._kept.append(tensor)
            bits = ov.Tensor(tensor.view(torch.uint16).numpy(), list(tensor.shape), ov.Type.bf16)
            narrow = op.constant(bits, shared_memory=True)
            return op.convert(narrow, "f32")
        self._kept.append(tensor)
        return op.constant(tensor.numpy(), shared_memory=True)

    def _input(self, name: str, dtype: ov.Type, shape: tuple[int, ...]) -> ov.Node:
        if name not in self._inputs:
            node = op.parameter(ov.PartialShape(list(shape)), dtype, name=name)
            node.output(0).set_names({name})
            self._inputs[name] = node
        return self._inputs[name]

    def _raised(self, rows: ov.Node) -> ov.Node:
        """[num_rows, width] → the rank that rows have inside."""
        return op.unsqueeze(rows, op.constant(np.int64(1))) if self._fuses_mlp else rows

    def _lowered(self, rows: ov.Node) -> ov.Node:
        """Rows from inside → [num_rows, width]."""
        if _port(rows).get_partial_shape().rank.get_length() == 2:
            return rows
        return op.squeeze(rows, op.constant(np.int64(1)))

    # -- operations ------------------------------------------------------------------------------

    def embedding(self, name: str, ids: ov.Node) -> ov.Node:
        """From an input: the engine binds the mapped family file; only used rows are read."""
        dtype = _STORED_TYPES[self._family.dtype]
        rows = self.gather_rows(self._input(name, dtype, (-1, self._store.shape(name)[1])), ids)
        return self._raised(rows if dtype == ov.Type.f32 else op.convert(rows, "f32"))

    def gather_rows(self, table: ov.Node, rows: ov.Node) -> ov.Node:
        gathered = op.gather(table, rows, op.constant(np.int32(0)))
        if any(table is t for t in self._tables):
            gathered.set_friendly_name(f"{TABLE_ROWS}{gathered.get_friendly_name()}")
        return gathered

    def source_rows(self, below: ov.Node, features: ov.Node, rows: ov.Node) -> ov.Node:
        zero = op.constant(np.int32(0))
        is_kept = op.less(rows, zero)
        from_below = self.gather_rows(below, op.maximum(rows, zero))
        slots = op.maximum(op.subtract(op.constant(np.int32(-1)), rows), zero)
        kept = self.gather_rows(features, slots)
        return self._raised(
            op.select(op.unsqueeze(is_kept, op.constant(np.int64(1))), kept, from_below)
        )

    def linear(self, x: ov.Node, weight: ov.Node, bias: ov.Node | None) -> ov.Node:
        y = op.matmul(x, weight, False, True)
        return y if bias is None else op.add(y, bias)

    def linears(self, x: ov.Node, names: Sequence[str], has_bias: bool) -> list[ov.Output]:
        """One product, split: OpenVINO gathers its threads once for all of them.

        With the same in `swiglu` a decode step is 3 to 7 % shorter.
        """
        joined = self._product(x, names, has_bias)
        widths = [self._store.shape(f"{name}.weight")[0] for name in names]
        axis, widths = op.constant(np.int64(-1)), op.constant(np.array(widths, np.int64))
        return list(op.variadic_split(joined, axis, widths).outputs())

    def _product(self, x: ov.Node, names: Sequence[str], has_bias: bool) -> ov.Node:
        """x · the named matrices, one after the other."""

        def whole(part: str) -> ov.Node:
            return self._constant(torch.cat([self._finite(f"{name}.{part}") for name in names]))

        return self.linear(x, whole("weight"), whole("bias") if has_bias else None)

    def rms_norm(self, x: ov.Node, gain: ov.Node, eps: float) -> ov.Node:
        """In the shape that OpenVINO recognises and runs as one operation."""
        square = op.power(x, op.constant(np.float32(2)))
        mean = op.reduce_mean(square, op.constant(np.array([-1], np.int64)), keep_dims=True)
        root = op.sqrt(op.add(mean, op.constant(np.float32(eps))))
        scaled = op.multiply(x, op.divide(op.constant(np.float32(1)), root))
        return op.multiply(gain, scaled)

    def tier_exit(self, rows: ov.Node, tiers: ov.Node, gains: ov.Node, eps: float) -> ov.Node:
        """Of rows that the engine has gathered."""
        return self.rms_norm(rows, self.gather_rows(gains, tiers), eps)

    def split_heads(self, x: ov.Node, num_heads: int) -> ov.Node:
        """To [num_rows, num_heads, 1, d]: a row is a sequence to OpenVINO's rotary operation."""
        shape = np.array([-1, num_heads, 1, self._family.model.head_dim], np.int64)
        return op.reshape(x, op.constant(shape), False)

    def merge_heads(self, x: ov.Node) -> ov.Node:
        width = x.output(0).get_partial_shape()[1].get_length() * self._family.model.head_dim
        shape = [-1, 1, width] if self._fuses_mlp else [-1, width]
        return op.reshape(x, op.constant(np.array(shape, np.int64)), False)

    def rotary_embedding(self, x: ov.Node, cos: ov.Node, sin: ov.Node) -> ov.Node:
        """In the shape that OpenVINO recognises and runs as one operation."""
        half = self._family.model.head_dim // 2
        axes = op.constant(np.array([1, 2], np.int64))
        cos, sin = (op.unsqueeze(op.concat([t, t], 1), axes) for t in (cos, sin))
        negated = op.multiply(
            _slice(x, half, _TO_THE_END), op.constant(np.full((1, 1, 1, 1), -1, np.float32))
        )
        rotated = op.concat([negated, _slice(x, 0, half)], -1)
        return op.add(op.multiply(x, cos), op.multiply(rotated, sin))

    def swiglu(self, x: ov.Node, gate: str, up: str, has_bias: bool) -> ov.Node:
        """With a Swish of one input: so OpenVINO recognises the MLP and, where the CPU multiplies
        bf16 matrices, runs it as one operation; its two products are left apart for that.
        """
        if self._fuses_mlp:
            g, u = (self._product(x, [name], has_bias).output(0) for name in (gate, up))
        else:
            g, u = self.linears(x, [gate, up], has_bias)
        return op.multiply(NodeFactory("opset4").create("Swish", [g]), u)

    def add(self, a: ov.Node, b: ov.Node) -> ov.Node:
        return op.add(a, b)

    def paged_attention(
        self,
        query: ov.Node,
        key: ov.Node,
        value: ov.Node,
        *,
        group: int,
        index_in_group: int,
        window: int | None,
    ) -> ov.Node:
        model = self._family.model
        cache_shape = (-1, model.num_kv_heads, BLOCK_SIZE, model.head_dim)
        where = f"{group}.{index_in_group}"
        query, key, value = (self._lowered(t) for t in (query, key, value))
        inputs = [
            query,
            key,
            value,
            self._input(f"key_cache.{where}", ov.Type.f32, cache_shape),
            self._input(f"value_cache.{where}", ov.Type.f32, cache_shape),
            self._input("past_lens", ov.Type.i32, (-1,)),
            self._input("subsequence_begins", ov.Type.i32, (-1,)),
            self._input(f"block_indices.{group}", ov.Type.i32, (-1,)),
            self._input("block_indices_begins", ov.Type.i32, (-1,)),
            op.constant(np.float32(model.head_dim**-0.5)),
            op.constant(np.int32(window or 0)),
            self._input("max_context_len", ov.Type.i32, ()),
        ]
        return self._raised(PagedAttentionCall([_port(i) for i in inputs]))


def _port(tensor: ov.Node | ov.Output) -> ov.Output:
    return tensor if isinstance(tensor, ov.Output) else tensor.output(0)


def _slice(x: ov.Node, first: int, last: int) -> ov.Node:
    """Elements [first, last) of the last of four dimensions."""
    bounds = (op.constant(np.array([i], np.int64)) for i in (first, last, 1, 3))
    return op.slice(x, *bounds)
