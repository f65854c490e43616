"""The TensorRT engine over networks that torch evaluates on the CPU: no GPU, no plan."""

from pathlib import Path

import torch

from mfs_trt.builder.config import BuildConfig
from mfs_trt.builder.tensorrt import Network, TensorRtBuilder
from mfs_trt.dtypes import item_size, torch_dtype
from mfs_trt.engine.manifest import EngineManifest
from mfs_trt.engine.tensorrt import TensorRtEngine
from mfs_trt.engine.tensorrt_api import load_api
from mfs_trt.engine.tensorrt_plans import Plans
from mfs_trt.tensor_names import EMBEDDING
from mfs_trt.weights.store import WeightStore
from tensorrt_evaluator import EvaluatedPlan
from tiny_folders import LIMITS


def rtx_config(**settings) -> BuildConfig:
    defaults = {"target": "tensorrt-rtx", "memory_nbytes": 8 << 20, "limits": LIMITS}
    return BuildConfig(**{**defaults, **settings})


def describe_networks(family_folder: Path, config: BuildConfig) -> list[Network]:
    """The networks of all segments, then of all distinct LM heads."""
    return [describe() for describe in _builder(WeightStore(family_folder), config).networks()]


def evaluated_engine(family_folder: Path, config: BuildConfig) -> TensorRtEngine:
    """The engine class itself, its plans replaced by evaluators."""
    store, dtype = WeightStore(family_folder), torch_dtype(config.dtype)
    family = store.spec
    builder = _builder(store, config)
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
    )


def _builder(store: WeightStore, config: BuildConfig) -> TensorRtBuilder:
    api = load_api(config.target)
    return TensorRtBuilder(api, store.spec, store, config, _kv_spec(store, config))


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
