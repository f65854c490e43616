"""Plans of a TensorRT engine folder: checked against this machine, loaded, run on its GPU."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from mfs_trt.engine.manifest import EngineManifest
from mfs_trt.engine.tensorrt_api import TensorRtApi, load_api
from mfs_trt.errors import EngineError
from mfs_trt.family.spec import FamilySpec

DECODE, PREFILL = 0, 1  # a plan's optimisation profiles


class Plan(Protocol):
    """One compiled network."""

    def bind(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Inputs, or outputs written in place, that stay the same in every run."""
        ...

    def run(self, tensors: Mapping[str, torch.Tensor], profile: int) -> torch.Tensor:
        """Enqueue on the current stream; returns the plan's one output that is not bound."""
        ...

    def close(self) -> None:
        """Keep what later loads are faster with."""
        ...


@dataclass(frozen=True)
class Plans:
    """`segments[s]` and `heads[weight name]`."""

    segments: tuple[Plan, ...]
    heads: dict[str, Plan]

    def close(self) -> None:
        for plan in (*self.segments, *self.heads.values()):
            plan.close()


class TensorRtPlan:
    """A loaded plan with one execution context for each optimisation profile."""

    def __init__(self, api: TensorRtApi, runtime: Any, path: Path) -> None:
        """Raises `EngineError` when the GPU or the library does not take the plan."""
        trt, content = api.module, path.read_bytes()
        if hasattr(runtime, "get_engine_validity"):
            validity, _ = runtime.get_engine_validity(content)
            if validity == trt.EngineValidity.INVALID:
                raise EngineError(
                    f"{path}: not valid for {_gpu()} with {api.target} {api.version}: "
                    f"{api.last_error()}; build it again for this GPU"
                )
        self._path = path
        self._engine = runtime.deserialize_cuda_engine(content)
        if self._engine is None:
            raise EngineError(f"{path}: {api.target} cannot load this plan: {api.last_error()}")
        self._cache: Any = None
        self._contexts = [self._new_context(api)]
        stream = torch.cuda.current_stream()
        for profile in range(1, self._engine.num_optimization_profiles):
            context = self._new_context(api)
            context.set_optimization_profile_async(profile, stream.cuda_stream)
            self._contexts.append(context)
        stream.synchronize()
        names = [self._engine.get_tensor_name(i) for i in range(self._engine.num_io_tensors)]
        output = trt.TensorIOMode.OUTPUT
        self._outputs = {n for n in names if self._engine.get_tensor_mode(n) == output}
        self._bound: dict[str, torch.Tensor] = {}  # a context knows addresses only
        self._dtypes = {
            trt.DataType.FLOAT: torch.float32,
            trt.DataType.HALF: torch.float16,
            trt.DataType.BF16: torch.bfloat16,
        }

    def bind(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for context in self._contexts:
            for name, tensor in tensors.items():
                self._set(context, name, tensor)
        self._bound |= tensors

    def run(self, tensors: Mapping[str, torch.Tensor], profile: int) -> torch.Tensor:
        context = self._contexts[profile]
        for name, tensor in tensors.items():
            self._set(context, name, tensor)
        (name,) = self._outputs - self._bound.keys()
        shape = tuple(context.get_tensor_shape(name))  # known once all inputs have one
        dtype = self._dtypes[self._engine.get_tensor_dtype(name)]
        device = next(iter(tensors.values())).device
        result = torch.empty(shape, dtype=dtype, device=device)
        context.set_tensor_address(name, result.data_ptr())
        if not context.execute_async_v3(torch.cuda.current_stream().cuda_stream):
            raise EngineError(f"{self._path}: a step failed to start on {_gpu()}")
        return result

    def close(self) -> None:
        """Keep the kernels that were compiled for this GPU, next to the plan."""
        if self._cache is None:
            return
        content = bytes(self._cache.serialize())
        with suppress(OSError):  # a folder that cannot be written costs compilation, no more
            self._cache_path.write_bytes(content)

    @property
    def _cache_path(self) -> Path:
        return self._path.with_suffix(".runtime_cache")

    def _set(self, context: Any, name: str, tensor: torch.Tensor) -> None:
        shape = tuple(tensor.shape)
        if name not in self._outputs and not context.set_input_shape(name, shape):
            raise EngineError(f"{self._path}: {name}: no profile takes the shape {list(shape)}")
        context.set_tensor_address(name, tensor.data_ptr())

    def _new_context(self, api: TensorRtApi) -> Any:
        arguments = []
        if api.has_runtime_cache:
            config = self._engine.create_runtime_config()
            if self._cache is None:
                self._cache = config.create_runtime_cache()
                if self._cache_path.exists():  # another GPU's or version's is passed over
                    self._cache.deserialize(self._cache_path.read_bytes())
            config.set_runtime_cache(self._cache)
            arguments.append(config)
        context = self._engine.create_execution_context(*arguments)
        if context is None:
            raise EngineError(f"{self._path}: no room to run it on {_gpu()}: {api.last_error()}")
        return context


def load_plans(folder: Path, manifest: EngineManifest, family: FamilySpec) -> Plans:
    """Raises `EngineError` naming file, version or GPU and both sides of a mismatch."""
    api = load_api(manifest.target)
    if api.version != manifest.backend_version:
        raise EngineError(
            f"{folder}: built with {manifest.target} {manifest.backend_version}, "
            f"found {api.version}: build it again, or install that version"
        )
    check_gpu(folder, manifest)
    runtime = api.create("Runtime")

    def loaded(name: str) -> TensorRtPlan:
        return TensorRtPlan(api, runtime, manifest.plan(name).check(folder))

    heads = dict.fromkeys(family.head_name(tier) for tier in range(len(family.tiers)))
    return Plans(
        tuple(loaded(f"segment_{s.index}") for s in family.segments),
        {name: loaded(f"head_{i}") for i, name in enumerate(heads)},
    )


def check_gpu(folder: Path, manifest: EngineManifest) -> None:
    """Raises `EngineError` unless this machine has a GPU that the plans were built for."""
    if torch.version.cuda is None:
        raise EngineError(
            f"{folder}: target {manifest.target} needs a torch with CUDA, found {torch.__version__}"
        )
    if not torch.cuda.is_available():
        raise EngineError(
            f"{folder}: target {manifest.target} needs an NVIDIA GPU and its driver, found none"
        )
    found = "sm{}{}".format(*torch.cuda.get_device_capability())
    expected = manifest.compute_capabilities
    if expected and found not in expected:
        raise EngineError(
            f"{folder}: built for {', '.join(expected)}, found {_gpu()} ({found}): "
            "build it again for this GPU"
        )


def _gpu() -> str:
    return torch.cuda.get_device_name()
