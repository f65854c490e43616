"""Full TensorRT as far as networks go: those of TensorRT-RTX, which take plugins as well.

A plugin is asked for its outputs by `tensorrt.plugin`'s own calls, in TensorRT's order. To the
network underneath its outputs are inputs, so that all layers behind them are checked as usual.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import tensorrt_rtx_bindings as rtx

import tensorrt_stand_in
from mfs_trt.engine.tensorrt_api import TensorRtApi, load_api

VERSION = "11.4.0.106"
_SHARED = ("DataType", "ITensor", "int32")  # the stand-in's own would be strangers to a network
_NOT_IN_FULL = ("ComputeCapability", "IRuntimeCache")


@dataclass(frozen=True)
class DescribedPlugin:
    """What TensorRT knows of a plugin once its outputs are known; -1: known at run time only."""

    output_types: list[Any]
    output_shapes: list[tuple[int, ...]]
    aliases: list[int]  # per output the input that it lies on, or -1
    descriptions: list[Any]  # of inputs, then of outputs
    takes_the_types: bool


def describe_plugin(
    trt: Any, plugin: Any, types: Sequence[Any], shapes: Sequence[Sequence[int]]
) -> DescribedPlugin:
    output_types = plugin.get_output_data_types(types, [len(shape) for shape in shapes])
    exprs = [[trt.IDimensionExpr(None if n == -1 else n) for n in shape] for shape in shapes]
    dims = plugin.get_output_shapes(exprs, [], trt.ExprBuilder())
    output_shapes = [tuple(-1 if e.value is None else e.value for e in d) for d in dims]
    descriptions = [
        trt.DynamicPluginTensorDesc(trt.PluginTensorDesc(shape, kind, trt.TensorFormat.LINEAR))
        for shape, kind in zip([*shapes, *output_shapes], [*types, *output_types], strict=True)
    ]
    formats = plugin.get_supported_format_combinations(descriptions, len(shapes))
    taken = [
        tuple(desc.type for desc in formats[i : i + len(descriptions)])
        for i in range(0, len(formats), len(descriptions))
    ]
    return DescribedPlugin(
        output_types,
        output_shapes,
        [plugin.get_aliased_input(i) for i in range(len(output_types))],
        descriptions,
        tuple(d.desc.type for d in descriptions) in taken,
    )


@dataclass(frozen=True)
class AddedPlugin:
    """A plugin layer of a network."""

    name: str
    attributes: dict[str, Any]
    inputs: list[Any]  # the network's tensors
    outputs: list[Any]
    aliases: list[int]
    num_layers_before: int

    def input_names(self) -> list[str]:
        return [tensor.name for tensor in self.inputs]


class PluginNetwork:
    """A network of TensorRT-RTX in whose definition plugins have a place."""

    def __init__(self, trt: Any, network: Any) -> None:
        vars(self).update(_trt=trt, _network=network, plugins=[], _outputs=[])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._network, name, value)

    def add_plugin(self, create: Any) -> Any:
        inputs, _, plugin = create(self._trt.QuickPluginCreationRequest.UNKNOWN)
        types, shapes = [t.dtype for t in inputs], [tuple(t.shape) for t in inputs]
        described = describe_plugin(self._trt, plugin, types, shapes)
        assert described.takes_the_types, f"{plugin.plugin_name}: no kernel for {types}"
        before, name = self._network.num_layers, f"plugin {len(self.plugins)}"
        outputs = [
            self._network.add_input(f"{name} output {i}", kind, shape)
            for i, (kind, shape) in enumerate(
                zip(described.output_types, described.output_shapes, strict=True)
            )
        ]
        added = AddedPlugin(
            plugin.plugin_name, plugin.attrs, inputs, outputs, described.aliases, before
        )
        self.plugins.append(added)
        return SimpleNamespace(get_output=outputs.__getitem__)

    def add_plugin_v2(self, inputs: Sequence[Any], plugin: Any) -> Any:
        """`plugin` says what comes out; see `llm_plugins`."""
        before, name = self._network.num_layers, f"plugin {len(self.plugins)}"
        kind, shape = plugin.describe([(t.dtype, tuple(t.shape)) for t in inputs])
        output = self._network.add_input(f"{name} output", kind, shape)
        added = AddedPlugin(plugin.name, plugin.fields, list(inputs), [output], [-1], before)
        self.plugins.append(added)
        return SimpleNamespace(get_output=[output].__getitem__)

    def mark_output(self, tensor: Any) -> None:
        self._outputs.append(tensor)

    @property
    def num_outputs(self) -> int:
        return len(self._outputs)

    def get_output(self, index: int) -> Any:
        return self._outputs[index]

    @property
    def num_inputs(self) -> int:
        return len(self._own_inputs())

    def get_input(self, index: int) -> Any:
        return self._own_inputs()[index]

    def _own_inputs(self) -> list[Any]:
        given = {t.name for plugin in self.plugins for t in plugin.outputs}
        tensors = map(self._network.get_input, range(self._network.num_inputs))
        return [tensor for tensor in tensors if tensor.name not in given]


class Settings:
    """A builder's configuration: keeps what it was asked for."""

    def __init__(self) -> None:
        self.preview_features, self.profiles = {}, []

    def clear_flag(self, flag: Any) -> None:
        pass

    def set_preview_feature(self, feature: Any, is_on: bool) -> None:
        self.preview_features[feature.name] = is_on

    def add_optimization_profile(self, profile: dict[str, Any]) -> None:
        self.profiles.append(profile.shapes)


class Builder:
    """Makes networks; its plans say what went into them."""

    def __init__(self, logger: Any) -> None:
        self._builder = rtx.Builder(logger)

    def create_network(self, flags: int) -> PluginNetwork:
        import tensorrt

        return PluginNetwork(tensorrt, self._builder.create_network(flags))

    def create_builder_config(self) -> Settings:
        return Settings()

    def create_optimization_profile(self) -> Any:
        shapes = {}
        return SimpleNamespace(
            shapes=shapes, set_shape=lambda name, *ranges: shapes.update({name: ranges})
        )

    def build_serialized_network(self, network: PluginNetwork, settings: Settings) -> bytes:
        plugins = [plugin.name for plugin in network.plugins]
        return repr((plugins, settings.preview_features, settings.profiles)).encode()


@contextmanager
def full_tensorrt(target: str = "tensorrt") -> Iterator[TensorRtApi]:
    """The API of the target; there is no module `tensorrt` before and afterwards."""
    besides = {
        name: value
        for name, value in vars(rtx).items()
        if not name.startswith("__") and name not in _NOT_IN_FULL
    }
    layers = [name for name in dir(rtx.INetworkDefinition) if name.startswith("add_")]
    definition = type(
        "INetworkDefinition", (), dict.fromkeys([*layers, "add_plugin", "add_plugin_v2"])
    )
    instead = {
        **{name: besides[name] for name in _SHARED},
        "Builder": Builder,
        "INetworkDefinition": definition,
        "__version__": VERSION,
    }
    with tensorrt_stand_in.real_plugin_package(besides, instead):
        yield load_api(target)
