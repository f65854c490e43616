"""Fixtures shared by all tests: tiny models of each architecture with random weights."""

import os
from pathlib import Path

import pytest
import torch

from hf_models import make_hf_folder

# OpenAI Triton decides when it is imported whether kernels are compiled or interpreted. Without a
# GPU they are interpreted, in the whole test process: nothing but the kernels' parity tests uses
# it there, and tests that compile kernels do so in a process of their own.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def _torch_defaults():
    """Every test starts and leaves with torch's defaults and a fixed seed."""
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def hf_folder(tmp_path):
    """A function `(architecture, **config overrides) -> folder`: writes a tiny random HF model."""
    count = iter(range(1000))

    def make(architecture: str = "llama", **overrides) -> Path:
        return make_hf_folder(
            tmp_path / f"hf-{architecture}-{next(count)}", architecture, **overrides
        )

    return make


@pytest.fixture
def family_folder(hf_folder, tmp_path):
    """A function `(hf_folder, exits, dtype=…) -> folder`: converts with tiers `t0`, `t1`, …."""
    from mfs_trt.checkpoint import open_checkpoint
    from mfs_trt.family.spec import TierSpec
    from mfs_trt.weights.convert import convert_checkpoint

    count = iter(range(1000))

    def make(source: Path | None = None, exits=(2, 4, 6), **settings) -> Path:
        folder = tmp_path / f"family-{next(count)}"
        tiers = tuple(TierSpec(f"t{i}", exit_layer) for i, exit_layer in enumerate(exits))
        convert_checkpoint(open_checkpoint(source or hf_folder()), tiers, folder, **settings)
        return folder

    return make
