"""Tiny family folders with random weights, and the engines built from them."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mfs_trt.builder.build import build_engine
from mfs_trt.builder.config import BuildConfig
from mfs_trt.dtypes import torch_dtype
from mfs_trt.engine.interface import EngineLimits
from mfs_trt.engine.manifest import EngineManifest
from mfs_trt.engine.openvino import OpenVinoEngine
from mfs_trt.engine.openvino_plans import compile_plans
from mfs_trt.family.spec import FamilySpec
from mfs_trt.model.transformer import NestedModel
from mfs_trt.tensor_names import EMBEDDING
from mfs_trt.weights.mapped import map_tensor
from mfs_trt.weights.store import WeightStore
from mfs_trt.weights.writer import TensorEntry, write_family
from tiny import tiny_family

LIMITS = EngineLimits(max_num_seqs=80, max_num_batched_tokens=512, max_model_len=256)
SIZES = {"hidden_size": 40, "intermediate_size": 48, "head_dim": 16}


def folder_family(
    exits: Sequence[int],
    own_heads: Sequence[int] = (),
    architecture: str = "llama",
    **overrides: Any,
) -> FamilySpec:
    """Tiers `t0`, `t1`, …; those of `own_heads` have an LM head of their own."""
    family = tiny_family(exits, **{**SIZES, "architecture": architecture, **overrides})
    tiers = (replace(t, own_head=i in own_heads) for i, t in enumerate(family.tiers))
    return replace(family, tiers=tuple(tiers))


def write_tiny_family(folder: Path, family: FamilySpec, dtype: str = "float32") -> Path:
    """Every exit has a norm gain of its own; hidden states and logits are of the order of one."""
    generator = torch.Generator().manual_seed(0)

    def load(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        base = 1.0 if "norm" in name else 0.0
        return (base + 0.2 * torch.randn(shape, generator=generator)).to(torch_dtype(dtype))

    entries = [
        TensorEntry(name, shape, dtype, partial(load, name, shape))
        for name, shape in family.tensor_shapes().items()
    ]
    write_family(folder, family.model, family.tiers, dtype, entries)
    return folder


def build_tiny_engine(family: Path, out: Path, target: str, **settings: Any) -> Path:
    """An engine folder with block size 32."""
    settings = {"memory_nbytes": 8 << 20, "limits": LIMITS, **settings}
    return build_engine(family, out, BuildConfig(target=target, **settings))


class OpenVinoPlans:
    """A family's plans, compiled once, under engines of any size."""

    def __init__(self, folder: Path, family: FamilySpec) -> None:
        """Writes family and engine into `folder`."""
        self._folder = write_tiny_family(folder / "family", family)
        engine = build_tiny_engine(folder / "family", folder / "engine", "openvino")
        manifest = EngineManifest.load(engine)
        self.family = manifest.load_family()
        self._plans = compile_plans(engine, manifest, self.family)
        self._kv_spec = manifest.kv_spec(self.family, self._plans.layer_nbytes)
        self._embedding, *gains = (
            map_tensor(folder / "family", self.family, name)
            for name in (EMBEDDING, *map(self.family.norm_name, range(len(family.tiers))))
        )
        self._gains = np.stack(gains)

    @cached_property
    def reference(self) -> NestedModel:
        """The same weights in torch, fp32."""
        return NestedModel.from_store(WeightStore(self._folder), LIMITS.max_model_len)

    def engine(
        self, num_frames: int, num_feature_slots: int = 0, limits: EngineLimits = LIMITS
    ) -> OpenVinoEngine:
        sizes = {"num_frames": num_frames, "num_feature_slots": num_feature_slots}
        spec = replace(self._kv_spec, **sizes)
        return OpenVinoEngine(self.family, self._plans, self._embedding, self._gains, limits, spec)
