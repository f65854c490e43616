"""Plans of a TensorRT engine folder: checked against this machine, loaded, run on its GPU."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from mfs_trt.engine.cuda_graphs import Recorded, RecordRun
from mfs_trt.engine.manifest import EngineManifest
from mfs_trt.engine.tensorrt_api import TensorRtApi, load_api, no_collection
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

    def record(
        self, tensors: Mapping[str, torch.Tensor], profile: int, record_run: RecordRun
    ) -> Recorded:
        """Run once, and record the run on tensors that stay where they are."""
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


class Workspace:
    """Memory that recorded runs compute in, one at a time: as much as the largest plan wants."""

    def __init__(self) -> None:
        self._nbytes, self._memory = 0, torch.empty(0)

    def reserve(self, nbytes: int) -> None:
        assert not len(self._memory), "it is in use"
        self._nbytes = max(self._nbytes, nbytes)

    def memory(self, device: torch.device) -> torch.Tensor:
        """[nbytes] uint8, the same in every call."""
        if not len(self._memory):
            self._memory = torch.empty(max(1, self._nbytes), dtype=torch.uint8, device=device)
        return self._memory


class TensorRtPlan:
    """A loaded plan with one execution context for each optimisation profile."""

    def __init__(
        self, api: TensorRtApi, runtime: Any, path: Path, workspace: Workspace | None = None
    ) -> None:
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
        with no_collection():
            self._engine = runtime.deserialize_cuda_engine(content)
        if self._engine is None:
            raise EngineError(f"{path}: {api.target} cannot load this plan: {api.last_error()}")
        self._api, self._workspace = api, workspace or Workspace()
        self._cache: Any = None
        self._workspace.reserve(self._engine.get_device_memory_size_for_profile_v2(DECODE))
        self._contexts = [self._new_context()]
        stream = torch.cuda.current_stream()
        for profile in range(1, self._engine.num_optimization_profiles):
            context = self._new_context()
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
        result = self._new_result(context, next(iter(tensors.values())).device)
        self._enqueue(context)
        return result

    def record(
        self, tensors: Mapping[str, torch.Tensor], profile: int, record_run: RecordRun
    ) -> Recorded:
        """In a context of its own, since TensorRT forbids to change one that was recorded."""
        device = next(iter(tensors.values())).device
        context, memory = self._new_context(is_recorded=True), self._workspace.memory(device)
        context.set_device_memory(memory.data_ptr(), memory.nbytes)
        stream = torch.cuda.current_stream().cuda_stream
        if profile:
            context.set_optimization_profile_async(profile, stream)
        for name, tensor in {**self._bound, **tensors}.items():
            self._set(context, name, tensor)
        result = self._new_result(context, device)
        replay: Callable[[], None] = partial(self._enqueue, context)
        replay()
        if not hasattr(context, "is_stream_capturable") or context.is_stream_capturable(stream):
            replay = record_run(replay)
        return Recorded(replay, result, kept=(context, memory, dict(tensors)))

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

    def _new_result(self, context: Any, device: torch.device) -> torch.Tensor:
        (name,) = self._outputs - self._bound.keys()
        shape = tuple(context.get_tensor_shape(name))  # known once all inputs have one
        dtype = self._dtypes[self._engine.get_tensor_dtype(name)]
        result = torch.empty(shape, dtype=dtype, device=device)
        context.set_tensor_address(name, result.data_ptr())
        return result

    def _enqueue(self, context: Any) -> None:
        if not context.execute_async_v3(torch.cuda.current_stream().cuda_stream):
            raise EngineError(f"{self._path}: a step failed to start on {_gpu()}")

    def _new_context(self, *, is_recorded: bool = False) -> Any:
        """A recorded one is given its memory, and kernels for its shapes before they are recorded.

        What RTX compiles goes to the runtime cache, whichever context it is for.
        """
        trt, config = self._api.module, self._engine.create_runtime_config()
        if self._api.has_runtime_cache:
            if self._cache is None:
                self._cache = config.create_runtime_cache()
                if self._cache_path.exists():  # another GPU's or version's is passed over
                    self._cache.deserialize(self._cache_path.read_bytes())
            config.set_runtime_cache(self._cache)
        if is_recorded:
            strategy = trt.ExecutionContextAllocationStrategy.USER_MANAGED
            config.set_execution_context_allocation_strategy(strategy)
            kinds = getattr(trt, "DynamicShapesKernelSpecializationStrategy", None)
            if kinds is not None:
                config.dynamic_shapes_kernel_specialization_strategy = kinds.EAGER
        context = self._engine.create_execution_context(config)
        if context is None:
            reason = self._api.last_error()
            raise EngineError(f"{self._path}: no room to run it on {_gpu()}: {reason}")
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
    runtime, workspace = api.create("Runtime"), Workspace()

    def loaded(name: str) -> TensorRtPlan:
        return TensorRtPlan(api, runtime, manifest.plan(name).check(folder), workspace)

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
