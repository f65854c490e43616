"""TensorRT plans: the description emitted, built for the GPUs asked for, one file a plan."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from mfs_trt.builder.config import BuildConfig
from mfs_trt.builder.emitters.tensorrt import TensorRtEmitter
from mfs_trt.builder.network import describe_head, describe_segment
from mfs_trt.builder.profiles import make_profiles
from mfs_trt.engine.interface import KVCacheSpec
from mfs_trt.engine.manifest import PlanFile
from mfs_trt.engine.tensorrt_api import TensorRtApi, load_api
from mfs_trt.engine.tensorrt_inputs import num_scratch_frames
from mfs_trt.errors import ConfigError, EngineError
from mfs_trt.family.spec import FamilySpec
from mfs_trt.weights.store import WeightStore


@dataclass(frozen=True)
class Network:
    """A described plan before it is built. The emitter keeps the weights alive."""

    name: str
    builder: Any
    emitter: TensorRtEmitter


class TensorRtBuilder:
    """Describes and builds the plans of one family for one configuration."""

    def __init__(
        self,
        api: TensorRtApi,
        family: FamilySpec,
        store: WeightStore,
        config: BuildConfig,
        kv_spec: KVCacheSpec,
    ) -> None:
        num_frames = kv_spec.num_frames + num_scratch_frames(config.limits, config.block_size)
        self._api, self._family, self._store, self._config = api, family, store, config
        self._arena = replace(kv_spec, num_frames=num_frames)
        num_slots = max(num_frames * config.block_size, kv_spec.num_feature_slots)
        self.profiles = make_profiles(
            config.limits, config.block_size, len(family.tiers), num_slots
        )

    def networks(self) -> list[Callable[[], Network]]:
        """One a segment, then one a distinct LM head, each described when it is called."""
        names = dict.fromkeys(map(self._family.head_name, range(len(self._family.tiers))))
        segments = [partial(self._segment, s) for s in range(len(self._family.segments))]
        return segments + [partial(self._head, i, name) for i, name in enumerate(names)]

    def build(self, network: Network) -> Any:
        """The plan's bytes; raises `ConfigError` with the library's reason when it cannot."""
        trt, settings = self._api.module, network.builder.create_builder_config()
        if self._config.dtype == "float32":
            settings.clear_flag(trt.BuilderFlag.TF32)
        self._set_compute_capabilities(settings)
        definition = network.emitter.network
        for profile in self.profiles:
            shapes = network.builder.create_optimization_profile()
            for i in range(definition.num_inputs):
                tensor = definition.get_input(i)
                if -1 in tuple(tensor.shape):
                    ranges = profile.shapes(tensor.name, tuple(tensor.shape))
                    shapes.set_shape(tensor.name, *ranges)
            settings.add_optimization_profile(shapes)
        plan = network.builder.build_serialized_network(definition, settings)
        if plan is None:
            raise ConfigError(
                f"target {self._api.target}: {self._api.version} cannot build {network.name} "
                f"({self._config.dtype}): {self._api.last_error()}"
            )
        return plan

    def _segment(self, index: int) -> Network:
        network, segment = self._new(f"segment_{index}"), self._family.segments[index]
        max_model_len = self._config.limits.max_model_len
        describe_segment(network.emitter, self._family, segment, max_model_len)
        return network

    def _head(self, index: int, weight_name: str) -> Network:
        network = self._new(f"head_{index}")
        describe_head(network.emitter, self._family, weight_name)
        return network

    def _new(self, name: str) -> Network:
        trt = self._api.module
        builder = self._api.create("Builder")
        network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        network.name = name
        emitter = TensorRtEmitter(
            self._api, network, self._family, self._store, self._config.dtype, self._arena
        )
        return Network(name, builder, emitter)

    def _set_compute_capabilities(self, settings: Any) -> None:
        wanted = self._config.compute_capabilities
        if wanted:
            settings.num_compute_capabilities = len(wanted)
            known = self._api.module.ComputeCapability
            for i, name in enumerate(wanted):
                settings.set_compute_capability(getattr(known, name.upper()), i)


def load_target(config: BuildConfig) -> TensorRtApi:
    """The module of `config.target`; raises `ConfigError` naming what it lacks or cannot do."""
    try:
        api = load_api(config.target)
    except EngineError as error:
        raise ConfigError(str(error)) from None
    unknown = [c for c in config.compute_capabilities if c not in api.compute_capabilities]
    if unknown:
        raise ConfigError(
            f"compute_capabilities: {config.target} {api.version} builds for "
            f"{', '.join(api.compute_capabilities)}, got {', '.join(unknown)}"
        )
    return api


def built_for(api: TensorRtApi, config: BuildConfig) -> tuple[str, ...]:
    """GPUs that the plans run on: those asked for, or this machine's; none is the module's choice.

    Raises `ConfigError` where the module builds for a GPU of this machine and there is none.
    """
    if config.compute_capabilities or api.compute_capabilities:
        return config.compute_capabilities
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(
            f"target {config.target}: builds for the GPU of this machine, found none; "
            "target tensorrt-rtx builds without one"
        )
    return ("sm{}{}".format(*torch.cuda.get_device_capability()),)


def build_plans(
    api: TensorRtApi,
    family: FamilySpec,
    store: WeightStore,
    config: BuildConfig,
    kv_spec: KVCacheSpec,
    folder: Path,
    on_plan: Callable[[str], None],
) -> tuple[PlanFile, ...]:
    """Write one plan a segment and one a distinct LM head; `on_plan` hears of each."""
    builder, plans = TensorRtBuilder(api, family, store, config, kv_spec), []
    for describe in builder.networks():
        network = describe()
        content = memoryview(builder.build(network))
        path = folder / f"{network.name}.plan"
        path.write_bytes(content)
        plans.append(PlanFile(network.name, {path.name: hashlib.sha256(content).hexdigest()}))
        on_plan(network.name)
    return tuple(plans)
