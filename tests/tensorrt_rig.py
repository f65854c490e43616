"""The TensorRT engine over networks that torch evaluates on the CPU: no GPU, no plan."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from llm_plugins import llm_tensorrt
from mfs_trt.builder.config import BuildConfig
from mfs_trt.builder.emitters.tensorrt_plugins import Launch
from mfs_trt.builder.tensorrt import Network, TensorRtBuilder
from mfs_trt.builder.tensorrt_ways import gpt_way, plugin_way, portable_way
from mfs_trt.dtypes import item_size, torch_dtype
from mfs_trt.engine.cuda_graphs import RecordRun
from mfs_trt.engine.manifest import EngineManifest
from mfs_trt.engine.tensorrt import TensorRtEngine
from mfs_trt.engine.tensorrt_api import load_api
from mfs_trt.engine.tensorrt_plans import Plans
from mfs_trt.tensor_names import EMBEDDING
from mfs_trt.weights.store import WeightStore
from plugin_networks import full_tensorrt
from tensorrt_evaluator import EvaluatedPlan
from tiny_folders import LIMITS

LAUNCH = Launch(compute_capability=90, tile_rows=16, num_splits=1)


def rtx_config(**settings) -> BuildConfig:
    defaults = {"target": "tensorrt-rtx", "memory_nbytes": 8 << 20, "limits": LIMITS}
    return BuildConfig(**{**defaults, **settings})


def full_config(**settings) -> BuildConfig:
    return rtx_config(**{"target": "tensorrt", **settings})


def describe_networks(
    family_folder: Path, config: BuildConfig, launch: Launch = LAUNCH
) -> list[Network]:
    """The networks of all segments, then of all distinct LM heads."""
    with _module(config):
        builder = _builder(WeightStore(family_folder), config, launch)
        return [describe() for describe in builder.networks()]


def evaluated_engine(
    family_folder: Path,
    config: BuildConfig,
    launch: Launch = LAUNCH,
    record_run: RecordRun | None = None,
) -> TensorRtEngine:
    """The engine class itself, its plans replaced by evaluators."""
    store, dtype = WeightStore(family_folder), torch_dtype(config.dtype)
    family = store.spec
    with _module(config):
        builder = _builder(store, config, launch)
        networks = [describe() for describe in builder.networks()]
    plans = [EvaluatedPlan(n.emitter.network, builder.profiles) for n in networks]
    num_segments, tiers = len(family.segments), range(len(family.tiers))
    heads = dict.fromkeys(map(family.head_name, tiers))
    return TensorRtEngine(
        family,
        Plans(tuple(plans[:num_segments]), dict(zip(heads, plans[num_segments:], strict=True))),
        store.get(EMBEDDING).to(dtype),
        torch.stack([store.get(family.norm_name(tier)) for tier in tiers]).to(dtype),
        config.limits,
        _kv_spec(store, config),
        builder.way.name,
        record_run,
    )


def _module(config: BuildConfig) -> AbstractContextManager[object]:
    """Full TensorRT and TensorRT-LLM are stood in for, TensorRT-RTX is here."""
    modules = {"tensorrt": full_tensorrt, "tensorrt-llm": llm_tensorrt}
    return modules.get(config.target, nullcontext)()


def _builder(store: WeightStore, config: BuildConfig, launch: Launch) -> TensorRtBuilder:
    api, kv_spec = load_api(config.target), _kv_spec(store, config)
    way = portable_way(store.spec)
    if config.target == "tensorrt-llm":
        way = gpt_way(store.spec, api, config)
    elif config.target == "tensorrt" and config.attention != "portable":
        way = plugin_way(store.spec, launch)
    return TensorRtBuilder(api, store.spec, store, config, kv_spec, way)


def _kv_spec(store: WeightStore, config: BuildConfig):
    manifest = EngineManifest(
        target=config.target,
        family=str(store.folder),
        family_revision=store.spec.revision,
        dtype=config.dtype,
        block_size=config.block_size,
        memory_nbytes=config.memory_nbytes,
        limits=config.limits,
    )
    return manifest.kv_spec(store.spec, manifest.layer_nbytes(store.spec, item_size(config.dtype)))
