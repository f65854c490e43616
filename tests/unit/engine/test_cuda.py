"""The cuda engine: the reference's numbers on kernels, and what it says on a machine without."""

import os

import numpy as np
import pytest
import torch

from mfs_trt.engine.cuda import CudaEngine, check_machine
from mfs_trt.engine.interface import EngineLimits
from mfs_trt.engine.manifest import EngineManifest
from mfs_trt.errors import EngineError
from random_steps import RandomSteps
from steps import Steps, close
from tiny import tiny_engine, tiny_family, tiny_model

DEVICES = [
    pytest.param(
        "cpu",
        marks=pytest.mark.skipif(
            os.environ.get("TRITON_INTERPRET") != "1", reason="kernels run on the GPU here"
        ),
    ),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
BLOCK_SIZE = 8
# Segments of one and two layer groups; a window on some layers; grouped heads.
FAMILIES = {
    "grouped heads": tiny_family((1, 3), num_heads=3, num_kv_heads=1),
    "window": tiny_family((1, 2), num_kv_heads=4, sliding_window=5, windowed_layers=(1,)),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", FAMILIES)
def test_random_steps_equal_the_reference(name, device):
    model = tiny_model(FAMILIES[name], torch.float32)
    num_tokens = 2 * BLOCK_SIZE
    ids = np.random.default_rng(0).integers(0, 61, (2, num_tokens)).astype(np.int32)
    settings = {"block_size": BLOCK_SIZE, "num_feature_slots": ids.size, "num_frames": 64}
    reference = tiny_engine(model, **settings)
    on_device = tiny_model(FAMILIES[name], torch.float32).to(device)
    cuda = CudaEngine(on_device, reference.limits, reference.kv_spec)
    walk, num_rows = RandomSteps(Steps(reference, ids), seed=0), 0
    while not walk.is_done:
        step = walk.next()
        expected, actual = reference.execute(step), cuda.execute(step)
        for theirs, ours in zip(expected.logits, actual.logits, strict=True):
            assert (theirs is None) == (ours is None)
            if theirs is not None:
                close(ours, theirs, 1e-4)
                num_rows += len(theirs)
    assert num_rows > 20
    for ours, theirs in zip(cuda.features, reference.features, strict=True):
        assert theirs.abs().sum(1).all(), "every token of every request was kept"
        close(ours.cpu().numpy(), theirs.numpy(), 1e-4)
    caches = [e.key_cache + e.value_cache for e in (cuda, reference)]
    for ours, theirs in zip(*caches, strict=True):
        close(ours.cpu().numpy(), theirs.numpy(), 1e-4)


def test_without_a_gpu_loading_names_what_is_missing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    manifest = EngineManifest(
        target="cuda",
        family="/nowhere",
        family_revision="x",
        dtype="float16",
        block_size=16,
        memory_nbytes=1 << 20,
        limits=EngineLimits(),
    )
    with pytest.raises(EngineError, match="target cuda: expected an NVIDIA GPU") as refused:
        CudaEngine.load(manifest)
    assert "\n" not in str(refused.value)


def test_without_its_kernels_the_engine_says_what_to_install(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("mfs_trt.engine.cuda.find_spec", lambda name: None)
    with pytest.raises(EngineError, match=r"pip install 'mfs-trt\[gpu\]'"):
        check_machine()
