"""Tiny families whose tiers differ in every tensor that an export could confuse."""

from pathlib import Path
from typing import Any

from mfs_trt.model_config import RopeConfig
from mfs_trt.request import PromptRequest
from mfs_trt.sampling_params import SamplingParams
from mfs_trt.serving.core import load_core
from mfs_trt.weights.store import WeightStore
from tiny import drain, submit
from tiny_folders import build_tiny_engine, folder_family, write_tiny_family

EXITS = (1, 3, 4)
LLAMA3 = {
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FAMILIES = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biased": ("llama", {"qkv_bias": True, "o_bias": True, "mlp_bias": True}),
    "llama-llama3": ("llama", {"rope": RopeConfig(5e5, "llama3", LLAMA3)}),
    "llama-linear": ("llama", {"rope": RopeConfig(1e4, "linear", {"factor": 2.0})}),
    "mistral": ("mistral", {}),
    "mistral-window": ("mistral", {"sliding_window": 7, "windowed_layers": (0, 1, 2, 3)}),
    "qwen2": ("qwen2", {"qkv_bias": True}),
    "qwen2-window": (
        "qwen2",
        {"qkv_bias": True, "sliding_window": 5, "windowed_layers": (2, 3)},
    ),
    "qwen3": ("qwen3", {"qk_norm": True, "tie_word_embeddings": True}),
}


def write_export_family(folder: Path, name: str, **more: Any) -> WeightStore:
    """Three tiers, the middle one with a head of its own; `more` settings of the model."""
    architecture, overrides = FAMILIES[name]
    family = folder_family(EXITS, (1,), architecture, **{**overrides, **more})
    return WeightStore(write_tiny_family(folder, family))


def engine_greedy(family: Path, tier: str, prompts: list[list[int]], max_tokens: int):
    """New tokens of every prompt from the reference engine at `tier`."""
    core = load_core(build_tiny_engine(family, family.parent / "engine", "reference"))
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    for i, token_ids in enumerate(prompts):
        submit(core, PromptRequest(str(i), params, token_ids=token_ids, tier=tier))
    events = drain(core)
    core.engine.close()
    return [
        [t for e in events if e.request_id == str(i) for t in e.token_ids]
        for i in range(len(prompts))
    ]
