"""The cuda engine: the reference's numbers on kernels, and what it says on a machine without."""

import os

import numpy as np
import pytest
import torch

from mfs_trt.engine.cuda import CudaEngine, check_machine
from mfs_trt.engine.cuda_graphs import make_recorder
from mfs_trt.engine.interface import EngineLimits
from mfs_trt.engine.manifest import EngineManifest
from mfs_trt.errors import EngineError
from random_steps import RandomSteps
from run_recorder import RunRecorder
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
    pytest.param("cuda, recorded", marks=pytest.mark.gpu),
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
    on_device = tiny_model(FAMILIES[name], torch.float32).to(device.split(",")[0])
    record_run = make_recorder() if "recorded" in device else None
    cuda = CudaEngine(on_device, reference.limits, reference.kv_spec, record_run)
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


@pytest.fixture
def kernels_by_reference(monkeypatch):
    """The operators' plain forms in place of kernels, which take seconds to interpret."""
    from mfs_trt.plugins import reference
    from mfs_trt.plugins.triton_kernels import kv_write, paged_attention

    def write(key, value, slots, key_cache, value_cache, *, group):
        for cache, rows in ((key_cache, key), (value_cache, value)):
            reference.kv_write(cache, rows, slots[:, group].long())

    def attend(query, *arguments, group, num_splits, tile_rows):
        *caches, tables, starts, lengths, scale, window = arguments
        tables = tables[:, :, group].long()
        plain = (tables, starts.tolist(), lengths.tolist(), scale, window)
        return reference.paged_attention(query, *caches, *plain)

    monkeypatch.setattr(kv_write, "kv_write", write)
    monkeypatch.setattr(paged_attention, "paged_attention", attend)


def test_decode_shaped_rows_are_padded_recorded_once_and_replayed(kernels_by_reference):
    """Five requests are padded to six rows; chunks of a prompt run as they come."""
    model, recorder = tiny_model(FAMILIES["window"], torch.float32), RunRecorder()
    ids = np.random.default_rng(0).integers(0, 61, (5, 2 * BLOCK_SIZE)).astype(np.int32)
    settings = {"block_size": BLOCK_SIZE, "num_frames": 64, "max_num_seqs": 6}
    reference = tiny_engine(model, **settings)
    cuda = CudaEngine(model, reference.limits, reference.kv_spec, recorder)
    both = [Steps(reference, ids), Steps(cuda, ids)]

    def counts_of(*items, tiers=None):
        """Runs recorded and replayed by a step."""
        for theirs, ours in zip(*(s.step(*items, tiers=tiers) for s in both), strict=True):
            assert (ours is None) == (theirs is None)
            if ours is not None:
                close(ours, theirs, 1e-4)
        return recorder.counts()

    assert counts_of(*((r, 0, 3) for r in range(5))) == (0, 0)
    assert counts_of(*((r, 3, 4) for r in range(5))) == (2, 2), "one recording a segment"
    assert counts_of(*((r, 4, 5) for r in range(5))) == (0, 2)
    assert counts_of((0, 5, 7), (1, 5, 6)) == (0, 0), "two rows of a request"
    tiers = (0, 1, 0, 1)
    assert counts_of((2, 5, 6), (1, 6, 7), (3, 5, 6), (4, 5, 6), tiers=tiers) == (2, 2)
    assert counts_of((0, 7, 8), (1, 7, 8), (2, 6, 7), tiers=(0, 0, 0)) == (1, 1)
    caches = [e.key_cache + e.value_cache for e in (cuda, reference)]
    for ours, theirs in zip(*caches, strict=True):
        close(ours.numpy(), theirs.numpy(), 1e-4)
        assert not ours[0].any(), "padding was written to the null frame"


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
