"""Token choice: logits of a step and each row's own parameters → one token per row."""

from mfs_trt.sampling.sampler import (
    InvalidLogitsError,
    Sample,
    SamplingRow,
    draw_uniform,
    filtered_distribution,
    sample,
)

__all__ = [
    "InvalidLogitsError",
    "Sample",
    "SamplingRow",
    "draw_uniform",
    "filtered_distribution",
    "sample",
]
