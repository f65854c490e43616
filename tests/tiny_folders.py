"""Tiny family folders with random weights, and the engines built from them."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from mfs_trt.builder.build import build_engine
from mfs_trt.builder.config import BuildConfig
from mfs_trt.dtypes import torch_dtype
from mfs_trt.engine.interface import EngineLimits
from mfs_trt.family.spec import FamilySpec
from mfs_trt.weights.writer import TensorEntry, write_family
from tiny import tiny_family

LIMITS = EngineLimits(max_num_seqs=80, max_num_batched_tokens=512, max_model_len=256)
SIZES = {"hidden_size": 40, "intermediate_size": 48, "head_dim": 16}


def folder_family(
    exits: Sequence[int], own_heads: Sequence[int] = (), architecture: str = "llama", **overrides
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


def build_tiny_engine(family: Path, out: Path, target: str, **settings) -> Path:
    """An engine folder with block size 32."""
    settings = {"memory_nbytes": 8 << 20, "limits": LIMITS, **settings}
    return build_engine(family, out, BuildConfig(target=target, **settings))
