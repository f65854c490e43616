"""Tokens per second of the `cuda` engine at each tier, against transformers on the same GPU.

Greedy decode of prompts of one length, their own step left out on both sides; rounds alternate.
Host work is in it: the whole loop, schedule to sampled tokens, and transformers' `generate`.
Usage: PYTHONPATH=perf python perf/gpu/engine.py FAMILY HF_FOLDER [--out FILE]; `--target reference`
runs the same on the CPU.
Status: tried with `--target reference` only; it has not run on a GPU.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from report import finish, show, spread

from mfs_trt.engine.interface import Engine, EngineLimits
from mfs_trt.engine.manifest import EngineManifest
from mfs_trt.family.spec import load_family
from mfs_trt.request import PromptRequest
from mfs_trt.sampling_params import SamplingParams
from mfs_trt.serving.core import EngineCore

PROMPT_TOKENS = 64


def load(target: str, family_dir: Path, dtype: str, batch: int, num_tokens: int) -> Engine:
    """An engine without a folder: its manifest is all there is to it."""
    length = PROMPT_TOKENS + num_tokens + 1
    manifest = EngineManifest(
        target=target,
        family=str(family_dir.resolve()),
        family_revision=load_family(family_dir).revision,
        dtype=dtype,
        block_size=32,
        memory_nbytes=2 << 30,
        limits=EngineLimits(batch, batch * PROMPT_TOKENS, length),
    )
    if target == "reference":
        from mfs_trt.engine.reference import ReferenceEngine

        return ReferenceEngine.load(manifest)
    from mfs_trt.engine.cuda import CudaEngine

    return CudaEngine.load(manifest)


def our_rate(core: EngineCore, tier: str, batch: int, num_tokens: int) -> float:
    """Tokens per second once every request has its first token."""
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    for i in range(batch):
        ids = list(range(5 + i, 5 + i + PROMPT_TOKENS))
        request = PromptRequest(f"r{i}", params, token_ids=ids, tier=tier)
        for sequence in core.make_requests(request):
            core.add(sequence)
    while any(r.num_output_tokens < 1 for r in core.scheduler.requests.values()):
        core.step()
    started, tokens = time.perf_counter(), 0
    while core.has_requests:
        tokens += sum(len(event.token_ids) for event in core.step())
    return tokens / (time.perf_counter() - started)


def their_rate(model: Any, batch: int, num_tokens: int) -> float:
    """Tokens per second of `generate`, the time of a single new token taken off."""
    ids = [list(range(5 + i, 5 + i + PROMPT_TOKENS)) for i in range(batch)]
    inputs = torch.tensor(ids, device=model.device)
    times = []
    for count in (1, num_tokens):
        started = time.perf_counter()
        model.generate(inputs, max_new_tokens=count, min_new_tokens=count, do_sample=False)
        times.append(time.perf_counter() - started)
    return batch * (num_tokens - 1) / (times[1] - times[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("family", type=Path)
    parser.add_argument("hf_folder", type=Path)
    parser.add_argument("--target", choices=("cuda", "reference"), default="cuda")
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    import transformers

    device = "cuda" if args.target == "cuda" else "cpu"
    engine = load(args.target, args.family, args.dtype, max(args.batches), args.tokens)
    core = EngineCore(engine, tokenizer=None)
    peer = transformers.AutoModelForCausalLM.from_pretrained(
        args.hf_folder, dtype=getattr(torch, args.dtype)
    ).to(device)
    peer.generation_config.eos_token_id = None
    result: dict[str, Any] = {"benchmark": "cuda_engine", "target": args.target}
    result |= {"dtype": args.dtype, "family": args.family.name}
    if device == "cuda":
        result["gpu"] = torch.cuda.get_device_name(0)
    rows = []
    for batch in args.batches:
        tiers = [tier.name for tier in engine.family.tiers]
        rates: dict[str, list[float]] = {name: [] for name in ("transformers", *tiers)}
        for _ in range(args.rounds + 1):
            rates["transformers"].append(their_rate(peer, batch, args.tokens))
            for tier in tiers:
                rates[tier].append(our_rate(core, tier, batch, args.tokens))
        counted = {name: values[1:] for name, values in rates.items()}  # the first one compiles
        theirs = np.array(counted["transformers"])
        figures = {name: {"tokens_per_s": spread(values)} for name, values in counted.items()}
        for tier in tiers:
            figures[tier]["over_transformers"] = spread(np.array(counted[tier]) / theirs)
            ratio = figures[tier]["over_transformers"]["median"]
            rows.append((batch, tier, figures[tier]["tokens_per_s"]["median"], ratio))
        result[f"batch {batch}"] = figures
    show("decode", ["batch", "tier", "tokens/s", "over transformers"], rows)
    finish(result, args.out)


if __name__ == "__main__":
    main()
