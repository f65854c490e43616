"""Rotary embedding: frequencies and tables for every scaling type, as transformers computes them.

Frequencies and angles are rounded to float32 where transformers rounds them, since at position p an
angle's rounding error grows with p; the cosine of such an angle is then taken in float64. That way
the tables hold what the model was trained with, and agree with transformers at any position.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from mfs_trt.errors import ConfigError
from mfs_trt.model_config import ModelConfig, RopeConfig

_TABLE_ROWS = 4096  # positions computed at a time, in float64


def rope_tables(config: ModelConfig, max_positions: int) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines, scaled for attention: two arrays `[max_positions, head_dim / 2]` float32.

    Raises `ConfigError` when no single table is right for contexts of `max_positions` tokens.
    """
    limit = max_exact_positions(config)
    if limit is not None and max_positions > limit:
        raise ConfigError(
            f"rope type {config.rope.scaling_type}: expected at most {limit} positions, since its "
            f"frequencies change with the length beyond, got {max_positions}"
        )
    frequencies, scaling = inverse_frequencies(config)
    shape = (max_positions, config.head_dim // 2)
    cos, sin = np.empty(shape, np.float32), np.empty(shape, np.float32)
    for first in range(0, max_positions, _TABLE_ROWS):
        rows = slice(first, min(first + _TABLE_ROWS, max_positions))
        positions = np.arange(rows.start, rows.stop, dtype=np.float32)
        angles = (positions[:, None] * frequencies).astype(np.float64)
        cos[rows] = np.cos(angles) * scaling
        sin[rows] = np.sin(angles) * scaling
    return cos, sin


def max_exact_positions(config: ModelConfig) -> int | None:
    """The longest context that one table serves exactly; None where any length is served.

    Beyond it transformers recomputes the frequencies for the whole sequence as it grows (`dynamic`)
    or swaps them once (`longrope`), which contradicts the keys that are cached already.
    """
    rope = config.rope
    if rope.scaling_type == "dynamic":
        return config.max_position_embeddings
    if rope.scaling_type == "longrope":
        scaling = rope.scaling
        if list(scaling["short_factor"]) != list(scaling["long_factor"]):
            return int(scaling["original_max_position_embeddings"])
    return None


def inverse_frequencies(config: ModelConfig) -> tuple[np.ndarray, float]:
    """Inverse frequencies `[head_dim / 2]` float32, and the factor on cosines and sines."""
    compute = _FREQUENCIES.get(config.rope.scaling_type)
    if compute is None:
        raise ConfigError(
            f"rope type: expected one of {', '.join(_FREQUENCIES)}, "
            f"got {config.rope.scaling_type!r}"
        )
    return compute(config)


def _base_powers(rope: RopeConfig, dim: int) -> np.ndarray:
    """`theta ** (2i / dim)` for i in [0, dim / 2), float32."""
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    return _power(rope.theta, exponents)


def _power(base: float, exponents: np.ndarray) -> np.ndarray:
    """torch's float32 power: often one unit off the true one, 2e-4 radians at position 4096."""
    import torch

    return torch.pow(base, torch.from_numpy(exponents)).numpy()


def _default(config: ModelConfig) -> tuple[np.ndarray, float]:
    return np.float32(1) / _base_powers(config.rope, config.head_dim), 1.0


def _linear(config: ModelConfig) -> tuple[np.ndarray, float]:
    frequencies, scaling = _default(config)
    return frequencies / np.float32(config.rope.scaling["factor"]), scaling


def _yarn(config: ModelConfig) -> tuple[np.ndarray, float]:
    """YaRN (2023): fast dimensions keep their frequency, slow ones are interpolated."""
    scaling: dict[str, Any] = config.rope.scaling
    dim, theta = config.head_dim, config.rope.theta
    original = scaling["original_max_position_embeddings"]
    factor = scaling.get("factor") or config.max_position_embeddings / original

    def correction_dim(rotations: float) -> float:
        """The dimension that turns `rotations` times within the original context."""
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = correction_dim(scaling.get("beta_fast") or 32)
    high = correction_dim(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    steps = np.arange(dim // 2, dtype=np.float32)
    ramp = np.clip((steps - np.float32(low)) / np.float32(high - low), 0, 1)
    kept = np.float32(1) - ramp
    powers = _base_powers(config.rope, dim)
    frequencies = np.float32(1) / (np.float32(factor) * powers) * (1 - kept) + 1 / powers * kept
    return frequencies, _yarn_attention(scaling, factor)


def _yarn_attention(scaling: dict[str, Any], factor: float) -> float:
    stated = scaling.get("attention_factor")
    if stated is not None:
        return float(stated)

    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    mscale, mscale_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if mscale and mscale_all:
        return magnitude(mscale) / magnitude(mscale_all)
    return magnitude(1)


def _longrope(config: ModelConfig) -> tuple[np.ndarray, float]:
    """LongRoPE (2024) within the original context: the short factors."""
    scaling: dict[str, Any] = config.rope.scaling
    original = scaling["original_max_position_embeddings"]
    factor = scaling.get("factor") or config.max_position_embeddings / original
    attention = scaling.get("attention_factor")
    if attention is None:
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    divisors = np.asarray(scaling["short_factor"], dtype=np.float32)
    if divisors.shape != (config.head_dim // 2,):
        raise ConfigError(
            f"short_factor: expected {config.head_dim // 2} numbers, got {divisors.size}"
        )
    powers = _base_powers(config.rope, config.head_dim)
    return np.float32(1) / (divisors * powers), float(attention)


def _llama3(config: ModelConfig) -> tuple[np.ndarray, float]:
    """Llama 3.1: long wavelengths are divided by the factor, short ones kept, a blend between."""
    scaling: dict[str, Any] = config.rope.scaling
    frequencies, _ = _default(config)
    factor = np.float32(scaling["factor"])
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    original = scaling["original_max_position_embeddings"]
    wavelengths = np.float32(1) / frequencies * np.float32(2 * math.pi)
    slow, fast = wavelengths > original / low, wavelengths < original / high
    scaled = np.where(slow, frequencies / factor, frequencies)
    share = (np.float32(1) / wavelengths * np.float32(original) - np.float32(low)) / np.float32(
        high - low
    )
    blended = (1 - share) * scaled / factor + share * scaled
    return np.where(~slow & ~fast, blended, scaled), 1.0


_FREQUENCIES: dict[str, Callable[[ModelConfig], tuple[np.ndarray, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _default,  # within the original context nothing is scaled
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
}
