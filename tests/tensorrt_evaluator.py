"""A TensorRT network definition evaluated with torch on the CPU, layer by layer.

What TensorRT would compile is what is computed here: weights, transposes, masks, rotary pairs. The
names and meanings are those of TensorRT's operator pages. Plugins are what their operators'
references say (`plugin_evaluator`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import tensorrt_rtx_bindings as trt
import torch
import torch.nn.functional as F
from torch import Tensor

from llm_plugins import evaluate_gpt_attention
from mfs_trt.engine.cuda_graphs import Recorded, RecordRun
from plugin_evaluator import evaluate_plugin
from tensorrt_weights import stored_weights

Values = dict[str, Tensor]
DTYPES = {
    trt.float32: torch.float32,
    trt.float16: torch.float16,
    trt.bfloat16: torch.bfloat16,
    trt.int32: torch.int32,
    trt.int64: torch.int64,
    trt.bool: torch.bool,
}
_BINARY = {
    trt.ElementWiseOperation.SUM: torch.add,
    trt.ElementWiseOperation.SUB: torch.sub,
    trt.ElementWiseOperation.PROD: torch.mul,
    trt.ElementWiseOperation.DIV: torch.div,
    trt.ElementWiseOperation.MAX: torch.maximum,
    trt.ElementWiseOperation.LESS: torch.lt,
    trt.ElementWiseOperation.GREATER: torch.gt,
    trt.ElementWiseOperation.AND: torch.logical_and,
}
_UNARY = {trt.UnaryOperation.SQRT: torch.sqrt, trt.UnaryOperation.NOT: torch.logical_not}


@dataclass(frozen=True)
class _Layer:
    inputs: tuple[str | None, ...]
    outputs: tuple[str, ...]
    evaluate: Callable[[list[Tensor | None], Values], Tensor | tuple[Tensor, ...]]


class EvaluatedPlan:
    """Has the interface of a loaded plan. Outputs of cache updates are their inputs, written."""

    def __init__(self, network: Any, profiles: Sequence[Any] = ()) -> None:
        """Reads the network once; it may be dropped afterwards. Shapes must fit `profiles`."""
        self._profiles = profiles
        self._layers: list[_Layer] = []
        self._constants: Values = {}
        self._bound: Values = {}
        inputs = [network.get_input(i) for i in range(network.num_inputs)]
        outputs = [network.get_output(i) for i in range(network.num_outputs)]
        self.inputs = {t.name: (DTYPES[t.dtype], tuple(t.shape)) for t in inputs}
        self.outputs = {t.name: (DTYPES[t.dtype], tuple(t.shape)) for t in outputs}
        plugins = list(getattr(network, "plugins", ()))
        for i in range(network.num_layers):
            while plugins and plugins[0].num_layers_before == i:
                self._layers.append(_plugin(plugins.pop(0)))
            layer = network.get_layer(i)
            kind = layer.type  # before the cast: IActivationLayer.type is its function
            layer.__class__, make = _KINDS[kind]
            output = layer.get_output(0).name
            if kind == trt.LayerType.CONSTANT:
                self._constants[output] = _constant(layer)
                continue
            tensors = [layer.get_input(j) for j in range(layer.num_inputs)]
            names = tuple(None if t is None else t.name for t in tensors)
            self._layers.append(_Layer(names, (output,), make(layer)))
        self._layers += map(_plugin, plugins)

    def bind(self, tensors: Mapping[str, Tensor]) -> None:
        self._bound |= tensors

    def close(self) -> None:
        pass

    def record(
        self, tensors: Mapping[str, Tensor], profile: int, record_run: RecordRun
    ) -> Recorded:
        """Evaluates the same tensors again at each replay."""
        output = self.run(tensors, profile).clone()

        def run() -> None:
            output.copy_(self.run(tensors, profile))

        return Recorded(record_run(run), output)

    def run(self, tensors: Mapping[str, Tensor], profile: int) -> Tensor:
        given = {**self._bound, **tensors}
        for name, (dtype, shape) in self.inputs.items():
            tensor = given[name]
            assert tensor.dtype == dtype, f"{name}: {tensor.dtype} for {dtype}"
            assert len(shape) == tensor.dim() and all(
                a in (-1, b) for a, b in zip(shape, tensor.shape, strict=True)
            ), f"{name}: {list(tensor.shape)} for {shape}"
            if self._profiles:
                least, _, greatest = self._profiles[profile].shapes(name, shape)
                assert all(
                    a <= b <= c for a, b, c in zip(least, tensor.shape, greatest, strict=True)
                ), f"{name}: {list(tensor.shape)} for profile {profile}: {least} to {greatest}"
        assert given.keys() == self.inputs.keys() | (self._bound.keys() & self.outputs.keys())
        values = {**self._constants, **{name: given[name] for name in self.inputs}}
        for layer in self._layers:
            arguments = [None if name is None else values[name] for name in layer.inputs]
            results = layer.evaluate(arguments, values)
            results = (results,) if isinstance(results, Tensor) else results
            values |= zip(layer.outputs, results, strict=True)
        for name in self._bound.keys() & self.outputs.keys():
            assert values[name].data_ptr() == self._bound[name].data_ptr(), f"{name}: not in place"
        (name,) = self.outputs.keys() - self._bound.keys()
        return values[name]


def _plugin(plugin: Any) -> _Layer:
    types = [DTYPES[t.dtype] for t in (*plugin.inputs, *plugin.outputs)]
    shapes = [tuple(t.shape) for t in (*plugin.inputs, *plugin.outputs)]

    def evaluate(arguments: list[Tensor], values: Values) -> tuple[Tensor, ...]:
        if plugin.name == "GPTAttention":
            results = evaluate_gpt_attention(arguments, plugin.attributes)
        else:
            results = evaluate_plugin(plugin.name, arguments, plugin.attributes)
        for tensor, dtype, shape in zip((*arguments, *results), types, shapes, strict=True):
            assert tensor.dtype == dtype, f"{plugin.name}: {tensor.dtype} for {dtype}"
            assert all(a in (-1, b) for a, b in zip(shape, tensor.shape, strict=True)), (
                f"{plugin.name}: {list(tensor.shape)} for {shape}"
            )
        for result, index in zip(results, plugin.aliases, strict=True):
            if index >= 0:
                assert result.data_ptr() == arguments[index].data_ptr(), f"{plugin.name}: a copy"
        return results

    return _Layer(tuple(plugin.input_names()), tuple(t.name for t in plugin.outputs), evaluate)


def _constant(layer: Any) -> Tensor:
    weights, shape = layer.weights, tuple(layer.shape)
    if isinstance(weights, trt.Weights):  # of a type that numpy lacks
        return stored_weights(weights, prod(shape)).reshape(shape)
    return torch.from_numpy(weights.copy()).reshape(shape)


def _dequantize(layer: Any) -> Callable[..., Tensor]:
    dtype, axis = DTYPES[layer.to_type], layer.axis

    def evaluate(arguments: list[Tensor], values: Values) -> Tensor:
        x, scale = arguments
        assert scale.dtype == dtype and (scale > 0).all(), "a scale that TensorRT does not take"
        if scale.dim() == 1:  # one for each index of the axis
            assert len(scale) == x.shape[axis]
            scale = scale.reshape([-1 if i == axis else 1 for i in range(x.dim())])
        elif scale.dim() == 2:  # blocks along one of the two
            for i in range(2):
                scale = scale.repeat_interleave(x.shape[i] // scale.shape[i], dim=i)
            assert scale.shape == x.shape
        return x.to(dtype) * scale

    return evaluate


def _shuffle(layer: Any) -> Callable[..., Tensor]:
    first, second = tuple(layer.first_transpose), tuple(layer.second_transpose)
    shape = layer.reshape_dims
    shape = None if shape is None else tuple(shape)

    def evaluate(arguments: list[Tensor], values: Values) -> Tensor:
        x = arguments[0].permute(first[: arguments[0].dim()])
        if shape is not None:
            x = x.reshape([x.shape[i] if d == 0 else d for i, d in enumerate(shape)])
        return x.permute(second[: x.dim()])

    return evaluate


def _gather(layer: Any) -> Callable[..., Tensor]:
    axis = layer.axis
    assert layer.mode == trt.GatherMode.DEFAULT

    def evaluate(arguments: list[Tensor], values: Values) -> Tensor:
        data, index = arguments
        assert ((index >= 0) & (index < data.shape[axis])).all(), "index out of range"
        return data[(*(slice(None),) * axis, index.long())]

    return evaluate


def _matrix_multiply(layer: Any) -> Callable[..., Tensor]:
    transposed = [op == trt.MatrixOperation.TRANSPOSE for op in (layer.op0, layer.op1)]

    def evaluate(arguments: list[Tensor], values: Values) -> Tensor:
        a, b = (t.mT if is_t else t for t, is_t in zip(arguments, transposed, strict=True))
        return a @ b

    return evaluate


def _reduce(layer: Any) -> Callable[..., Tensor]:
    assert layer.op == trt.ReduceOperation.AVG and layer.keep_dims
    axes = [axis for axis in range(8) if layer.axes >> axis & 1]
    return lambda arguments, values: arguments[0].mean(axes, keepdim=True)


def _rotary(layer: Any) -> Callable[..., Tensor]:
    is_interleaved, width = layer.interleaved, layer.rotary_embedding_dim

    def evaluate(arguments: list[Tensor], values: Values) -> Tensor:
        x, cos, sin = arguments[:3]  # [batch, heads, rows, d]; [batch, rows, d / 2]
        assert x.shape[-1] == width == 2 * cos.shape[-1]
        assert cos.shape[:2] == sin.shape[:2] == (x.shape[0], x.shape[2])
        cos, sin = cos[:, None], sin[:, None]
        a, b = (x[..., ::2], x[..., 1::2]) if is_interleaved else x.chunk(2, -1)
        pair = a * cos - b * sin, b * cos + a * sin
        return torch.stack(pair, -1).flatten(-2) if is_interleaved else torch.cat(pair, -1)

    return evaluate


def _kv_cache_update(layer: Any) -> Callable[..., Tensor]:
    assert layer.cache_mode == trt.KVCacheMode.LINEAR
    assert layer.update_form == trt.AttentionIOForm.PACKED_NHD
    lengths_name = layer.update_lengths.name

    def evaluate(arguments: list[Tensor], values: Values) -> Tensor:
        cache, update, offsets = arguments[:3]
        starts = values[lengths_name].long()
        counts = starts.diff()
        assert starts[0] == 0 and starts[-1] == len(update) and (counts >= 0).all()
        assert (offsets + counts <= cache.shape[2]).all(), "a write beyond its frame"
        frames = torch.repeat_interleave(torch.arange(len(counts)), counts)
        slots = offsets[frames] + torch.arange(len(update)) - starts[frames]
        cache[frames, :, slots] = update
        return cache

    return evaluate


def _attention(layer: Any) -> Callable[..., Tensor]:
    attention = layer.attention
    assert attention.norm_op == trt.AttentionNormalizationOp.SOFTMAX
    assert attention.causal_kind == trt.CausalMaskKind.NONE
    assert attention.query_form == attention.key_value_form == trt.AttentionIOForm.PADDED_BHND
    mask_name = attention.mask.name

    def evaluate(arguments: list[Tensor], values: Values) -> Tensor:
        mask = values[mask_name]
        assert mask.dtype == torch.bool and mask.any(-1).all(), "a query that sees no key"
        return F.scaled_dot_product_attention(
            *arguments[:3], attn_mask=mask, scale=1.0, enable_gqa=True
        )

    return evaluate


def _elementwise(layer: Any) -> Callable[..., Tensor]:
    function = _BINARY[layer.op]

    def evaluate(arguments: list[Tensor], values: Values) -> Tensor:
        a, b = arguments
        assert a.dtype == b.dtype and a.dim() == b.dim(), "TensorRT converts and broadcasts nothing"
        return function(a, b)

    return evaluate


def _cast(layer: Any) -> Callable[..., Tensor]:
    dtype = DTYPES[layer.to_type]
    return lambda arguments, values: arguments[0].to(dtype)


def _unary(layer: Any) -> Callable[..., Tensor]:
    function = _UNARY[layer.op]
    return lambda arguments, values: function(arguments[0])


def _activation(layer: Any) -> Callable[..., Tensor]:
    assert layer.type == trt.ActivationType.SIGMOID
    return lambda arguments, values: torch.sigmoid(arguments[0])


def _concatenation(layer: Any) -> Callable[..., Tensor]:
    axis = layer.axis
    return lambda arguments, values: torch.cat(arguments, axis)


def _select(layer: Any) -> Callable[..., Tensor]:
    return lambda arguments, values: torch.where(*arguments)


def _same(layer: Any) -> Callable[..., Tensor]:
    return lambda arguments, values: arguments[0]


_KINDS = {
    trt.LayerType.CONSTANT: (trt.IConstantLayer, _same),
    trt.LayerType.DEQUANTIZE: (trt.IDequantizeLayer, _dequantize),
    trt.LayerType.CAST: (trt.ICastLayer, _cast),
    trt.LayerType.ELEMENTWISE: (trt.IElementWiseLayer, _elementwise),
    trt.LayerType.SHUFFLE: (trt.IShuffleLayer, _shuffle),
    trt.LayerType.GATHER: (trt.IGatherLayer, _gather),
    trt.LayerType.CONCATENATION: (trt.IConcatenationLayer, _concatenation),
    trt.LayerType.SELECT: (trt.ISelectLayer, _select),
    trt.LayerType.MATRIX_MULTIPLY: (trt.IMatrixMultiplyLayer, _matrix_multiply),
    trt.LayerType.REDUCE: (trt.IReduceLayer, _reduce),
    trt.LayerType.UNARY: (trt.IUnaryLayer, _unary),
    trt.LayerType.ACTIVATION: (trt.IActivationLayer, _activation),
    trt.LayerType.ROTARY_EMBEDDING: (trt.IRotaryEmbeddingLayer, _rotary),
    trt.LayerType.KV_CACHE_UPDATE: (trt.IKVCacheUpdateLayer, _kv_cache_update),
    trt.LayerType.ATTENTION_INPUT: (trt.IAttentionInputLayer, _attention),
    trt.LayerType.ATTENTION_OUTPUT: (trt.IAttentionOutputLayer, _same),
}
