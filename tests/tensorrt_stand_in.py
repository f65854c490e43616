"""A stand-in for the compiled part of `tensorrt`, under the real `tensorrt.plugin`.

The Python package `tensorrt.plugin` of `tensorrt_cu13_bindings` (it checks plugin definitions, and
is what TensorRT calls for shapes, types, kernels and launches) runs as it is; the enumerations,
descriptions and expressions below it come from the library elsewhere, and from here in tests.
Expressions are evaluated at once, for one set of shapes; None stands for a number that is known at
run time only.
"""

import enum
import importlib.util
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

PACKAGE = "tensorrt_cu13_bindings"


class DataType(enum.Enum):
    FLOAT = enum.auto()
    HALF = enum.auto()
    BF16 = enum.auto()
    INT32 = enum.auto()
    INT64 = enum.auto()
    FP8 = enum.auto()
    INT4 = enum.auto()


class TensorFormat(enum.Enum):
    LINEAR = enum.auto()


class DimensionOperation(enum.Enum):
    SUM = enum.auto()
    SUB = enum.auto()
    PROD = enum.auto()
    MAX = enum.auto()
    MIN = enum.auto()
    EQUAL = enum.auto()
    LESS = enum.auto()
    FLOOR_DIV = enum.auto()
    CEIL_DIV = enum.auto()


_COMPUTE = {
    DimensionOperation.SUM: lambda a, b: a + b,
    DimensionOperation.SUB: lambda a, b: a - b,
    DimensionOperation.PROD: lambda a, b: a * b,
    DimensionOperation.MAX: max,
    DimensionOperation.MIN: min,
    DimensionOperation.FLOOR_DIV: lambda a, b: a // b,
    DimensionOperation.CEIL_DIV: lambda a, b: -(-a // b),
}


@dataclass(frozen=True)
class IDimensionExpr:
    value: int | None

    def is_constant(self) -> bool:
        return self.value is not None

    def get_constant_value(self) -> int:
        return self.value


class ExprBuilder:
    def constant(self, value: int) -> IDimensionExpr:
        return IDimensionExpr(value)

    def operation(self, op, first: IDimensionExpr, second: IDimensionExpr) -> IDimensionExpr:
        if first.value is None or second.value is None:
            return IDimensionExpr(None)
        return IDimensionExpr(_COMPUTE[op](first.value, second.value))


class DimsExprs(list):
    def __init__(self, length: int) -> None:
        super().__init__([None] * length)


class Dims(tuple):
    MAX_DIMS = 8


@dataclass
class PluginTensorDesc:
    dims: tuple[int, ...] = ()
    type: DataType | None = None
    format: TensorFormat | None = None
    scale: float = 1.0


@dataclass
class DynamicPluginTensorDesc:
    desc: PluginTensorDesc
    opt: tuple[int, ...] = ()
    min: tuple[int, ...] = ()
    max: tuple[int, ...] = ()


class SymExprSetter(list):
    """The integers that go to the kernel between its inputs and its outputs."""

    @property
    def nbSymExprs(self) -> int:  # TensorRT's name
        return len(self)

    @nbSymExprs.setter
    def nbSymExprs(self, count: int) -> None:
        self[:] = [None] * count


class PluginField:
    def __init__(self, name: str, data: Any = None, type: Any = None) -> None:
        self.name, self.type = name, type
        self.data = np.frombuffer(data, np.int8) if isinstance(data, bytes) else data


@dataclass
class Registry:
    creators: dict[tuple[str, str], Any] = field(default_factory=dict)

    def register_creator(self, creator: Any, namespace: str) -> None:
        self.creators[namespace, creator.name] = creator

    def get_creator(self, name: str, version: str, namespace: str) -> Any:
        return self.creators[namespace, name]

    def get_plugin_creator(self, name: str, version: str, namespace: str) -> Any:
        """Of the second version of plugins; None where nobody has registered it."""
        return self.creators.get((namespace, name))


class ITensor:
    pass


@contextmanager
def real_plugin_package(
    besides: Mapping[str, Any] = MappingProxyType({}),
    instead: Mapping[str, Any] = MappingProxyType({}),
) -> Iterator[Any]:
    """`tensorrt.plugin` over this stand-in; everything is forgotten afterwards.

    The module `tensorrt` has what is here, names of `besides`, and first of all of `instead`.
    Raises `ModuleNotFoundError` naming the package to install.
    """
    found = importlib.util.find_spec("tensorrt_bindings")
    if found is None:
        raise ModuleNotFoundError(f"no {PACKAGE}: pip install --no-deps {PACKAGE}")
    kept = {name: module for name, module in sys.modules.items() if _is_ours(name)}
    for name in kept:
        del sys.modules[name]
    sys.modules["tensorrt"] = _module(found.submodule_search_locations)
    vars(sys.modules["tensorrt"]).update({**besides, **vars(sys.modules["tensorrt"]), **instead})
    try:
        yield importlib.import_module("tensorrt.plugin")
    finally:
        for name in [name for name in sys.modules if _is_ours(name)]:
            del sys.modules[name]
        sys.modules.update(kept)


def _is_ours(name: str) -> bool:
    return name.split(".")[0] == "tensorrt" or name == "mfs_trt.plugins.qdp"


def _module(path: Sequence[str]) -> types.ModuleType:
    module: Any = types.ModuleType("tensorrt")
    module.__path__ = list(path)
    registry = Registry()
    names = {name: value for name, value in globals().items() if isinstance(value, type)}
    empty = (
        *("IPluginV3", "IPluginV3QuickCore", "IPluginV3QuickBuild", "IPluginV3QuickRuntime"),
        *("IPluginV3QuickAOTBuild", "IPluginCreatorV3Quick", "ISymExpr"),
    )
    for name in empty:
        names[name] = type(name, (), {})
    members = {
        "PluginFieldType": "INT8 INT16 INT32 INT64 FLOAT16 FLOAT32 FLOAT64 CHAR UNKNOWN",
        "QuickPluginCreationRequest": "UNKNOWN PREFER_JIT PREFER_AOT STRICT_JIT STRICT_AOT",
        "TensorRTPhase": "BUILD RUNTIME",
        "PluginArgType": "INT",
        "PluginArgDataType": "INT8 INT16 INT32",
    }
    for name, values in members.items():
        names[name] = enum.Enum(name, values.split())
    logger = type("Logger", (), {"WARNING": 2, "log": lambda self, severity, text: None})
    vars(module).update(
        names,
        Logger=logger,
        PluginFieldCollection=list,
        get_plugin_registry=lambda: registry,
        int32=DataType.INT32,
    )
    return module
