"""TensorRT plans: the description emitted, built for the GPUs asked for, one file a plan."""

import gc
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
from mfs_trt.builder.tensorrt_progress import OnPhase, make_monitor
from mfs_trt.builder.tensorrt_ways import Way
from mfs_trt.builder.weight_formats import check_gpus
from mfs_trt.engine.interface import KVCacheSpec
from mfs_trt.engine.manifest import PlanFile
from mfs_trt.engine.tensorrt_api import TensorRtApi, load_api, no_collection
from mfs_trt.engine.tensorrt_inputs import make_inputs
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
        way: Way,
    ) -> None:
        self._api, self._family, self._store, self._config = api, family, store, config
        self.way = way
        scratch = make_inputs(way.name, config.limits, kv_spec).num_scratch_frames
        num_frames = kv_spec.num_frames + scratch
        self._arena = replace(kv_spec, num_frames=num_frames)
        num_slots = max(num_frames * config.block_size, kv_spec.num_feature_slots)
        self.profiles = make_profiles(
            config.limits, config.block_size, len(family.tiers), num_slots, way.name
        )

    def networks(self) -> list[Callable[[], Network]]:
        """One a segment, then one a distinct LM head, each described when it is called."""
        names = dict.fromkeys(map(self._family.head_name, range(len(self._family.tiers))))
        segments = [partial(self._segment, s) for s in range(len(self._family.segments))]
        return segments + [partial(self._head, i, name) for i, name in enumerate(names)]

    def build(self, network: Network, on_phase: OnPhase = lambda phase, share: None) -> Any:
        """The plan's bytes; raises `ConfigError` with the library's reason when it cannot."""
        trt, settings = self._api.module, network.builder.create_builder_config()
        monitor = make_monitor(trt, network.name, on_phase)  # it must outlive the build
        settings.progress_monitor = monitor
        if self._config.dtype == "float32":
            settings.clear_flag(trt.BuilderFlag.TF32)
        self._set_compute_capabilities(settings)
        network.emitter.attention.configure(settings)
        definition = network.emitter.network
        for profile in self.profiles:
            shapes = network.builder.create_optimization_profile()
            for i in range(definition.num_inputs):
                tensor = definition.get_input(i)
                if -1 in tuple(tensor.shape):
                    ranges = profile.shapes(tensor.name, tuple(tensor.shape))
                    shapes.set_shape(tensor.name, *ranges)
            settings.add_optimization_profile(shapes)
        with no_collection():
            plan = network.builder.build_serialized_network(definition, settings)
        if plan is None:
            raise ConfigError(
                f"target {self._api.target}: {self._api.version} cannot build {network.name} "
                f"({self._config.dtype}): {self._api.last_error()}"
            )
        return plan

    def _segment(self, index: int) -> Network:
        segment, num_groups = self._family.segments[index], self._arena.groups_per_segment[index]
        network = self._new(f"segment_{index}", num_groups)
        max_model_len = self._config.limits.max_model_len
        describe_segment(network.emitter, self._family, segment, max_model_len)
        return network

    def _head(self, index: int, weight_name: str) -> Network:
        network = self._new(f"head_{index}", num_groups=0)
        describe_head(network.emitter, self._family, weight_name)
        return network

    def _new(self, name: str, num_groups: int) -> Network:
        """`num_groups`: layer groups of the network."""
        trt = self._api.module
        builder = self._api.create("Builder")
        network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        network.name = name
        emitter = self.way.emitter(
            self._api,
            network,
            self._family,
            self._store,
            self._config.dtype,
            lambda layers: self.way.make(layers, self._arena, num_groups),
            self._config.weight_format,
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

    Raises `ConfigError` where the module builds for a GPU of this machine and there is none, or one
    that does not take the weights' format.
    """
    if config.compute_capabilities or api.compute_capabilities:
        return config.compute_capabilities
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(
            f"target {config.target}: builds for the GPU of this machine, found none; "
            "target tensorrt-rtx builds without one"
        )
    gpus = ("sm{}{}".format(*torch.cuda.get_device_capability()),)
    check_gpus(config.weight_format, config.target, gpus)
    return gpus


def build_plans(
    api: TensorRtApi,
    family: FamilySpec,
    store: WeightStore,
    config: BuildConfig,
    kv_spec: KVCacheSpec,
    way: Way,
    folder: Path,
    on_plan: Callable[[str], None],
    on_phase: OnPhase,
) -> tuple[PlanFile, ...]:
    """Write one plan a segment and one a distinct LM head; `on_plan` hears of each, `on_phase` of
    what the library does meanwhile.
    """
    builder, plans = TensorRtBuilder(api, family, store, config, kv_spec, way), []
    for describe in builder.networks():
        network = describe()
        content = memoryview(builder.build(network, on_phase))
        path = folder / f"{network.name}.plan"
        path.write_bytes(content)
        plans.append(PlanFile(network.name, {path.name: hashlib.sha256(content).hexdigest()}))
        on_plan(network.name)
        del network, content
        gc.collect()  # emitter and attention hold each other, and with them a segment's weights
    return tuple(plans)
