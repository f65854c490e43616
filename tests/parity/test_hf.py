"""A family gives the logits and tokens that Hugging Face's model of the same weights gives."""

import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hf_models import make_hf_folder
from mfs_trt.builder.build import build_engine
from mfs_trt.builder.config import BuildConfig
from mfs_trt.checkpoint import open_checkpoint
from mfs_trt.engine import load_engine
from mfs_trt.engine.interface import EngineLimits
from mfs_trt.family.spec import TierSpec
from mfs_trt.request import PromptRequest
from mfs_trt.sampling_params import SamplingParams
from mfs_trt.scheduler.batch import prepare
from mfs_trt.serving.core import EngineCore
from mfs_trt.weights.convert import convert_checkpoint
from tiny import drain, submit

TIERS = (TierSpec("t0", 2), TierSpec("t1", 3, own_head=True), TierSpec("t2", 6))
TOLERANCE = 1e-4
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MODELS = {
    "llama": ("llama", {}),
    "llama-tied-biased": (
        "llama",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "llama-rope-scaled": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 7}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
    ),
    "qwen3": ("qwen3", {}),
}
LENGTHS = (1, 2, 6, 7, 8, 23, 40)


class Pair:
    """The same weights as a Hugging Face model and as an engine folder of three tiers."""

    def __init__(self, source: Path, folder: Path) -> None:
        self.hf = AutoModelForCausalLM.from_pretrained(
            source, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        family = folder / "family"
        convert_checkpoint(open_checkpoint(source), TIERS, family)
        self.weights = tell_exits_apart(family / "base.safetensors")
        limits = EngineLimits(max_num_seqs=8, max_num_batched_tokens=9, max_model_len=64)
        config = BuildConfig(target="reference", block_size=4, memory_nbytes=4 << 20, limits=limits)
        self.engine = load_engine(build_engine(family, folder / "engine", config))

    def hf_tier(self, tier: int):
        """The Hugging Face model cut to the tier's layers, with the tier's norm and head."""
        spec = TIERS[tier]
        model = copy.deepcopy(self.hf)
        model.config.num_hidden_layers = spec.exit_layer
        model.model.config.num_hidden_layers = spec.exit_layer
        model.model.layers = model.model.layers[: spec.exit_layer]
        exit_ = f"exits.{spec.exit_layer}"
        model.model.norm.weight = torch.nn.Parameter(self.weights[f"{exit_}.norm.weight"])
        if spec.own_head:
            model.lm_head.weight = torch.nn.Parameter(self.weights[f"{exit_}.lm_head.weight"])
        return model


def tell_exits_apart(path: Path) -> dict[str, torch.Tensor]:
    """Change the lower tiers' norms and heads, which conversion makes equal to the top tier's."""
    weights = load_file(path)
    for name, tensor in weights.items():
        if name.startswith("exits.") and not name.startswith("exits.6."):
            weights[name] = tensor + 0.3 * torch.randn_like(tensor)
    save_file(weights, path)
    return weights


@pytest.fixture(scope="module", params=MODELS)
def pair(request, tmp_path_factory):
    architecture, overrides = MODELS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    # Weights so wide that attention, window and rotary embedding show in the logits.
    source = make_hf_folder(folder / "hf", architecture, initializer_range=0.2, **overrides)
    return Pair(source, folder)


def prompt(length: int) -> list[int]:
    return np.random.default_rng(length).integers(0, 199, length).tolist()


def hf_logits(model, ids: list[int]) -> np.ndarray:
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].numpy()


def prefill_logits(core: EngineCore, ids: list[int], tier: int) -> np.ndarray:
    """Logits of every prompt token at `tier`, the prompt cut into chunks by the budget."""
    params = SamplingParams(max_tokens=1)
    submit(core, PromptRequest("r", params, token_ids=ids, tier=f"t{tier}"))
    kv_cache = core.scheduler.kv_cache
    parts = []
    while True:
        output = core.scheduler.schedule()
        step = prepare(output, kv_cache.tables, kv_cache.spec.block_size)
        segments = list(step.segments)
        everything = np.arange(segments[tier].num_rows, dtype=np.int32)
        segments[tier] = replace(segments[tier], exit_rows=everything)
        parts.append(core.engine.execute(replace(step, segments=tuple(segments))).logits[tier])
        core.scheduler.update(output, {})
        if any(output.sampled):
            core.abort("r")
            return np.concatenate(parts)


@pytest.mark.parametrize("tier", [0, 1, 2])
def test_logits_of_a_tier_equal_those_of_the_model_cut_to_its_layers(pair, tier):
    model, core = pair.hf_tier(tier), EngineCore(pair.engine, tokenizer=None)
    for length in LENGTHS:
        ids = prompt(length)
        actual, expected = prefill_logits(core, ids, tier), hf_logits(model, ids)
        np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE)


def test_logits_of_every_generated_token_equal_those_of_the_full_model(pair):
    core = EngineCore(pair.engine, tokenizer=None)
    params = SamplingParams(max_tokens=12, end_id=-1, return_generation_logits=True)
    for length in LENGTHS:
        submit(core, PromptRequest(str(length), params, token_ids=prompt(length)))
    events = drain(core)
    for length in LENGTHS:
        mine = [e for e in events if e.request_id == str(length)]
        tokens = [t for e in mine for t in e.token_ids]
        expected = hf_logits(pair.hf, [*prompt(length), *tokens[:-1]])[length - 1 :]
        actual = np.concatenate([e.logits for e in mine])
        np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE)


def test_greedy_tokens_equal_generate(pair):
    core = EngineCore(pair.engine, tokenizer=None)
    params = SamplingParams(max_tokens=16, end_id=-1)
    for length in LENGTHS:
        submit(core, PromptRequest(str(length), params, token_ids=prompt(length)))
    tokens: dict[str, list[int]] = {}
    for event in drain(core):
        tokens.setdefault(event.request_id, []).extend(event.token_ids)
    for length in LENGTHS:
        ids = torch.tensor([prompt(length)])
        out = pair.hf.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=16,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert tokens[str(length)] == out[0, length:].tolist()
