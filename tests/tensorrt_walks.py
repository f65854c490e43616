"""Steps of six requests on the reference engine and on evaluated TensorRT networks."""

import numpy as np

from mfs_trt.engine.interface import EngineLimits
from random_steps import RandomSteps
from steps import Steps
from tiny_folders import folder_family

TOLERANCE = 5e-5  # of fp32 logits and hidden states, whose standard deviation is 1 to 5
LIMITS = EngineLimits(max_num_seqs=6, max_num_batched_tokens=1024, max_model_len=128)
IDS = np.random.default_rng(0).integers(0, 61, (6, 128)).astype(np.int32)
FAULTY = folder_family(  # some matrices are square, and two layer groups in the second segment
    (1, 3), (), "qwen2", hidden_size=64, qkv_bias=True, sliding_window=9, windowed_layers=(1, 2)
)


def with_features(engine):
    """The engine with feature pools that hold every token of every request."""
    size = (IDS.size, engine.family.model.hidden_size)
    engine.features = [pool.new_zeros(size) for pool in engine.features]
    return engine


def largest_error(expected, actual) -> float:
    """Over the exits of a step."""
    errors = [0.0]
    for theirs, ours in zip(expected, actual, strict=True):
        assert (theirs is None) == (ours is None)
        if theirs is not None:
            assert np.isfinite(ours).all()
            errors.append(float(np.abs(ours - theirs).max()))
    return max(errors)


def error_of_a_walk(reference: Steps, tensorrt: Steps) -> float:
    """Largest error in the first steps of a random walk."""
    walk, worst = RandomSteps(reference, seed=1), 0.0
    for _ in range(8):
        step = walk.next()
        expected, actual = (s.engine.execute(step).logits for s in (reference, tensorrt))
        worst = max(worst, largest_error(expected, actual))
    return worst
