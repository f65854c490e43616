"""The ways in which TensorRT plans attend, and the one that a build takes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mfs_trt.builder.config import BuildConfig
from mfs_trt.builder.emitters.tensorrt import TensorRtEmitter
from mfs_trt.builder.emitters.tensorrt_attention import Attention
from mfs_trt.builder.emitters.tensorrt_layers import TensorRtLayers
from mfs_trt.builder.emitters.tensorrt_llm import (
    GptAttention,
    TensorRtLlmEmitter,
    check_model,
    find_creator,
)
from mfs_trt.builder.emitters.tensorrt_plugins import Launch, PluginAttention, choose_launch
from mfs_trt.builder.emitters.tensorrt_portable import PortableAttention
from mfs_trt.engine.interface import KVCacheSpec
from mfs_trt.engine.tensorrt_api import TensorRtApi
from mfs_trt.errors import ConfigError
from mfs_trt.family.spec import FamilySpec
from mfs_trt.plugins.registry import register_plugins

# A network's layers, the arena with its scratch frames, layer groups of the network → its part.
MakeAttention = Callable[[TensorRtLayers, KVCacheSpec, int], Attention]


@dataclass(frozen=True)
class Way:
    """`name` is the manifest's, by which the engine knows what to feed."""

    name: str
    make: MakeAttention
    emitter: type[TensorRtEmitter] = TensorRtEmitter


def portable_way(family: FamilySpec) -> Way:
    """Native layers."""
    return Way("portable", lambda layers, arena, _: PortableAttention(layers, family.model, arena))


def plugin_way(family: FamilySpec, launch: Launch) -> Way:
    """Our plugins, compiled for one GPU."""
    return Way(
        "plugin",
        lambda layers, arena, num_groups: PluginAttention(
            layers, family.model, arena, num_groups, launch
        ),
    )


def gpt_way(family: FamilySpec, api: TensorRtApi, config: BuildConfig) -> Way:
    """TensorRT-LLM's plugin; raises `ConfigError` where it is missing or does not fit."""
    check_model(family.model, config.block_size)
    creator = find_creator(api)
    return Way(
        "gpt_attention",
        lambda layers, arena, num_groups: GptAttention(
            layers, family.model, arena, num_groups, config.limits, creator
        ),
        TensorRtLlmEmitter,
    )


def choose_way(
    api: TensorRtApi, family: FamilySpec, config: BuildConfig, gpus: Sequence[str]
) -> Way:
    """The way asked for, else our plugins where networks take them, for the one GPU of `gpus`.

    Raises `ConfigError` naming what the module or this machine lacks.
    """
    if config.target == "tensorrt-llm":
        return gpt_way(family, api, config)
    if config.attention == "portable" or not (config.attention or api.has_plugins):
        return portable_way(family)
    if not api.has_plugins:
        raise ConfigError(
            f"attention: target {config.target}: networks of {api.module.__name__} {api.version} "
            "take no plugins; expected portable, or target tensorrt with tensorrt>=10.13"
        )
    try:
        register_plugins()
    except ImportError as error:
        raise ConfigError(f"attention: {error}; portable needs neither") from None
    return plugin_way(family, _launch_here(family, config, gpus))


def _launch_here(family: FamilySpec, config: BuildConfig, gpus: Sequence[str]) -> Launch:
    import torch

    (gpu,) = gpus
    num_processors = torch.cuda.get_device_properties().multi_processor_count
    capability, num_kv_heads = int(gpu.removeprefix("sm")), family.model.num_kv_heads
    return choose_launch(config.limits, num_kv_heads, capability, num_processors)
