"""The TensorRT module behind one name: `tensorrt`, or `tensorrt_rtx_bindings` of TensorRT-RTX.

Both have the same network API; what only one of them can do is asked of `TensorRtApi`.
"""

import gc
import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from mfs_trt.errors import EngineError

# target → its modules, the first one that imports is taken; and what to install
_MODULES = {
    "tensorrt": (("tensorrt",), "pip install 'tensorrt_cu13>=11.1'"),
    "tensorrt-rtx": (
        ("tensorrt_rtx_bindings", "tensorrt_rtx"),
        "pip install 'mfs-trt[trt-rtx]'",
    ),
    "tensorrt-llm": (("tensorrt",), "pip install 'mfs-trt[trtllm]'"),
}
TARGETS = tuple(_MODULES)
# What a plan is made of, beyond layers that every version has.
_NATIVE = ("add_attention_v2", "add_kv_cache_update", "add_rotary_embedding")
_NEEDED = {"tensorrt": _NATIVE, "tensorrt-rtx": _NATIVE, "tensorrt-llm": ("add_plugin_v2",)}


@dataclass(frozen=True)
class TensorRtApi:
    """A TensorRT module. Reports of the library are kept in `errors`, none is printed."""

    target: str
    module: Any
    errors: list[str] = field(default_factory=list)

    @property
    def version(self) -> str:
        return str(self.module.__version__)

    @property
    def compute_capabilities(self) -> tuple[str, ...]:
        """GPUs that plans can be built for without having them; none where a GPU is needed."""
        known = getattr(self.module, "ComputeCapability", None)
        if known is None:
            return ()
        names = (name for name in dir(known) if name.startswith("SM") and name[2:].isdigit())
        return tuple(sorted((name.lower() for name in names), key=lambda name: int(name[2:])))

    @property
    def has_runtime_cache(self) -> bool:
        """Whether kernels are compiled at load and can be kept on disk."""
        return hasattr(self.module, "IRuntimeCache")

    @property
    def has_plugins(self) -> bool:
        """Whether networks take plugins that are written in Python."""
        return hasattr(self.module.INetworkDefinition, "add_plugin")

    def dtype(self, name: str) -> Any:
        """The module's data type of ours: `float16` → `DataType.HALF`."""
        codes = {"float32": "FLOAT", "float16": "HALF", "bfloat16": "BF16", "int32": "INT32"}
        codes["int64"] = "INT64"
        codes |= {"int8": "INT8", "int4": "INT4", "float8_e4m3fn": "FP8"}
        return getattr(self.module.DataType, codes[name])

    def new_logger(self) -> Any:
        """A logger that appends errors to `errors`; it must outlive what is made with it."""
        module, errors = self.module, self.errors
        base: Any = module.ILogger

        class Logger(base):
            def __init__(self) -> None:
                base.__init__(self)

            def log(self, severity: Any, message: str) -> None:
                if severity in (module.ILogger.ERROR, module.ILogger.INTERNAL_ERROR):
                    errors.append(message)

        return Logger()

    def create(self, kind: str) -> Any:
        """A new `Builder` or `Runtime`; raises `EngineError` where the library gives none."""
        try:
            with no_collection():
                return getattr(self.module, kind)(self.new_logger())
        except TypeError:  # what the bindings make of the library's null
            raise EngineError(
                f"target {self.target}: {self.version} gives no {kind}: {self.last_error()}"
            ) from None

    def last_error(self) -> str:
        """The library's last report in one line, or `no reason given`."""
        text = self.errors[-1] if self.errors else "no reason given"
        return " ".join(text.split())


@contextmanager
def no_collection() -> Iterator[None]:
    """No garbage is collected meanwhile: the library calls loggers under a lock of its own, which
    the end of one of its objects takes again; collected from within a logger it waits for itself.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def load_api(target: str) -> TensorRtApi:
    """The module of `target`; raises `EngineError` naming what to install."""
    names, install = _MODULES[target]
    module = _first_module(target, names, install)
    network = getattr(module, "INetworkDefinition", None)
    missing = [name for name in _NEEDED[target] if not hasattr(network, name)]
    if missing:
        raise EngineError(
            f"target {target}: {module.__name__} {getattr(module, '__version__', '?')} has no "
            f"{', '.join(missing)}; expected a newer one ({install})"
        )
    if target == "tensorrt-llm":
        _first_module(target, ("tensorrt_llm",), install)  # its import loads its plugin library
    return TensorRtApi(target, module)


def _first_module(target: str, names: Sequence[str], install: str) -> Any:
    reasons = []
    for name in names:
        try:
            return importlib.import_module(name)
        except (ImportError, OSError, RuntimeError) as error:  # libraries of it may be missing
            if not (isinstance(error, ModuleNotFoundError) and error.name == name):
                reasons.append(" ".join(str(error).split()))
    reason = reasons[0] if reasons else "it is not installed"
    raise EngineError(f"target {target}: cannot import {names[0]} ({install}): {reason}")
