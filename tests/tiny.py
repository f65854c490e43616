"""Tiny nested models and cores for tests: random weights, made in memory, no files."""

from collections.abc import Sequence

import torch

from mfs_trt.engine.interface import EngineLimits, KVCacheSpec
from mfs_trt.engine.reference import ReferenceEngine
from mfs_trt.family.spec import FamilySpec, TierSpec
from mfs_trt.model.transformer import NestedModel
from mfs_trt.model_config import ModelConfig, RopeConfig
from mfs_trt.request import PromptRequest, TokenEvent
from mfs_trt.sampling_params import SamplingParams
from mfs_trt.serving.core import EngineCore


def tiny_config(**overrides) -> ModelConfig:
    settings = {
        "architecture": "llama",
        "vocab_size": 61,
        "hidden_size": 24,
        "intermediate_size": 32,
        "num_layers": 4,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 6,
        "rms_norm_eps": 1e-5,
        "rope": RopeConfig(),
        "max_position_embeddings": 256,
    }
    return ModelConfig(**{**settings, **overrides})


def tiny_family(exits: Sequence[int] = (1, 2, 4), **overrides) -> FamilySpec:
    """Tiers `t0`, `t1`, … after the given layers; the default has segments of 1, 1 and 2 layers."""
    tiers = tuple(TierSpec(f"t{i}", exit_layer) for i, exit_layer in enumerate(exits))
    return FamilySpec(
        model=tiny_config(num_layers=exits[-1], **overrides),
        tiers=tiers,
        revision="tiny",
        weight_files=(),
        dtype="float64",
    )


def tiny_model(
    family: FamilySpec, dtype: torch.dtype = torch.float64, seed: int = 0, deep_scale: float = 1.0
) -> NestedModel:
    """Weights wide enough that greedy tokens vary.

    `deep_scale`: of what layers behind the first exit add; small values make the tiers agree.
    """
    generator = torch.Generator().manual_seed(seed)
    model = NestedModel(family, family.model.max_position_embeddings).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            base = 1.0 if "norm" in name else 0.0
            parameter.copy_(base + 0.3 * values)
        for layer in model.layers[family.tiers[0].exit_layer :]:
            layer.self_attn.o_proj.weight *= deep_scale
            layer.mlp.down_proj.weight *= deep_scale
    return model.requires_grad_(False)


def tiny_engine(
    model: NestedModel,
    *,
    block_size: int = 4,
    num_frames: int = 512,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 128,
    num_feature_slots: int = 0,
) -> ReferenceEngine:
    family = model.family
    spec = KVCacheSpec(
        group_size=family.group_size,
        groups_per_segment=family.groups_per_segment,
        num_kv_heads=family.model.num_kv_heads,
        head_dim=family.model.head_dim,
        block_size=block_size,
        layer_nbytes=2
        * family.model.num_kv_heads
        * family.model.head_dim
        * block_size
        * model.embed_tokens.weight.dtype.itemsize,
        num_frames=num_frames,
        num_feature_slots=num_feature_slots,
    )
    return ReferenceEngine(
        model, EngineLimits(max_num_seqs, max_num_batched_tokens, max_model_len), spec
    )


def submit(core: EngineCore, request: PromptRequest) -> None:
    for sequence in core.make_requests(request):
        core.add(sequence)


def run_alone(
    model: NestedModel, token_ids: Sequence[int], tier: str, params: SamplingParams
) -> list[int]:
    """The tokens that a request gets with the engine to itself, its prompt in one piece."""
    core = EngineCore(tiny_engine(model), tokenizer=None)
    submit(core, PromptRequest("alone", params, token_ids=token_ids, tier=tier))
    return [t for event in drain(core) for t in event.token_ids]


def drain(core: EngineCore) -> list[TokenEvent]:
    """Step until nothing is left to do."""
    events: list[TokenEvent] = []
    while core.has_requests:
        events += core.step()
    return events
