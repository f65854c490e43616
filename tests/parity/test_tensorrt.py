"""On a GPU: TensorRT's plans give the reference engine's numbers on the same step inputs."""

from functools import partial

import numpy as np
import pytest
import torch

from mfs_trt.engine import load_engine
from mfs_trt.engine.interface import EngineLimits
from random_steps import RandomSteps
from steps import Steps, close, num_ties
from tiny_folders import build_tiny_engine, folder_family, write_tiny_family

LIMITS = EngineLimits(max_num_seqs=6, max_num_batched_tokens=1024, max_model_len=128)
IDS = np.random.default_rng(0).integers(0, 61, (6, 128)).astype(np.int32)
FAMILIES = {
    "llama, all biases, m = 1": folder_family((2, 4), qkv_bias=True, o_bias=True, mlp_bias=True),
    "mistral, windows, own head, m = 1, 1, 2": folder_family(
        (1, 2, 4), (0,), "mistral", sliding_window=40, windowed_layers=(0, 1, 2, 3)
    ),
    "qwen3, tied and own head, m = 2, 1": folder_family(
        (2, 3), (0,), "qwen3", qk_norm=True, tie_word_embeddings=True
    ),
}
# Differences of logits, over their spread: greatest of a row, and root mean square.
TOLERANCES = {"float32": (1e-3, 1e-4), "float16": (0.1, 0.02), "bfloat16": (0.6, 0.1)}

pytestmark = pytest.mark.gpu


@pytest.fixture(
    scope="module",
    params=[
        ("tensorrt-rtx", "portable"),
        pytest.param(("tensorrt", "portable"), marks=pytest.mark.trt),
        pytest.param(("tensorrt", "plugin"), marks=pytest.mark.trt),
    ],
    ids="-".join,
)
def build(request):
    """A function `(family folder, out, **settings) -> engine folder` for a target and its way."""
    target, attention = request.param
    return partial(build_tiny_engine, target=target, attention=attention, limits=LIMITS)


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    return write_tiny_family(tmp_path_factory.mktemp("family") / "f", FAMILIES[request.param])


def with_features(engine):
    size = (IDS.size, engine.family.model.hidden_size)
    engine.features = [pool.new_zeros(size) for pool in engine.features]
    return engine


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_random_steps_equal_the_reference(folder, build, dtype, tmp_path):
    greatest, mean_square = TOLERANCES[dtype]
    reference = Steps(
        with_features(
            load_engine(build_tiny_engine(folder, tmp_path / "r", "reference", limits=LIMITS))
        ),
        IDS,
    )
    engine = load_engine(build(folder, tmp_path / "t", dtype=dtype))
    with_features(engine)
    walk = RandomSteps(reference, seed=0)
    while not walk.is_done:
        step = walk.next()
        expected, actual = reference.engine.execute(step), engine.execute(step)
        for theirs, ours in zip(expected.logits, actual.logits, strict=True):
            assert (theirs is None) == (ours is None)
            if theirs is not None:
                error = (ours - theirs) / theirs.std()
                assert np.abs(error).max() < greatest
                assert np.sqrt(np.mean(error**2)) < mean_square
    engine.close()


def test_arena_holds_the_keys_and_values_of_the_reference(folder, build, tmp_path):
    oracle = build_tiny_engine(folder, tmp_path / "r", "reference", limits=LIMITS)
    built = build(folder, tmp_path / "t")
    reference, tensorrt = (Steps(load_engine(engine), IDS) for engine in (oracle, built))
    for steps in (reference, tensorrt):
        steps.step((0, 0, 64), (1, 0, 33))
        steps.step((0, 64, 128), (1, 33, 64))
    caches = zip(reference.engine.key_cache, reference.engine.value_cache, strict=True)
    frames = np.unique(np.concatenate([[0], *(t[:2].ravel() for t in reference.tables)]))
    for theirs, ours in zip(caches, tensorrt.engine.arena, strict=True):
        for a, b in zip(theirs, ours, strict=True):
            close(b.cpu().numpy()[frames], a.numpy()[frames], 1e-3)


def test_compiled_kernels_are_kept_for_the_next_load(folder, tmp_path):
    built = build_tiny_engine(
        folder, tmp_path / "e", "tensorrt-rtx", dtype="float16", limits=LIMITS
    )
    logits = []
    for _ in range(2):
        engine = load_engine(built)
        logits.append(Steps(engine, IDS).step((0, 0, 65))[-1])
        engine.close()
        assert (built / "segment_0.runtime_cache").stat().st_size > 0
    close(logits[0], logits[1], 0.05)
    assert num_ties(logits[0], logits[1].argmax(axis=1), tolerance=0.05) >= 0


@pytest.fixture(autouse=True)
def _gpu():
    if not torch.cuda.is_available():
        pytest.fail("marked gpu, and torch finds none")
