"""SmolLM2's tiers exported: transformers and OpenVINO GenAI give our engine's tokens.

`MFS_TRT_GENAI_PYTHON` names the Python of an environment with openvino-genai and optimum-intel.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from mfs_trt.builder.build import build_engine
from mfs_trt.builder.config import BuildConfig
from mfs_trt.checkpoint.gguf_writer import write_gguf_checkpoint
from mfs_trt.checkpoint.hf_writer import write_hf_checkpoint
from mfs_trt.engine.interface import EngineLimits
from mfs_trt.request import PromptRequest
from mfs_trt.sampling_params import SamplingParams
from mfs_trt.serving.core import load_core
from mfs_trt.weights.store import WeightStore
from mfs_trt.weights.tier import TierCheckpoint
from smollm2 import MAX_TOKENS, PROMPTS, generate_greedily
from tiny import drain, submit

pytestmark = pytest.mark.slow
TEXTS = PROMPTS[:8]
TIERS = ("small", "medium", "large")


@pytest.fixture(scope="module")
def core(smollm2_family, tmp_path_factory):
    limits = EngineLimits(max_num_seqs=16, max_num_batched_tokens=64, max_model_len=512)
    config = BuildConfig(target="reference", memory_nbytes=256 << 20, limits=limits)
    return load_core(build_engine(smollm2_family, tmp_path_factory.mktemp("engine") / "e", config))


@pytest.fixture(scope="module", params=TIERS)
def exported(request, core, smollm2_family, tmp_path_factory):
    """(the tier's Hugging Face folder, prompts, our engine's tokens)"""
    folder = tmp_path_factory.mktemp(request.param) / "hf"
    write_hf_checkpoint(TierCheckpoint(WeightStore(smollm2_family), request.param), folder)
    prompts = [core.tokenizer.encode(text) for text in TEXTS]
    for i, ids in enumerate(prompts):
        params = SamplingParams(max_tokens=MAX_TOKENS)
        submit(core, PromptRequest(str(i), params, token_ids=ids, tier=request.param))
    events = drain(core)
    tokens = [
        [t for e in events if e.request_id == str(i) for t in e.token_ids]
        for i in range(len(prompts))
    ]
    return folder, prompts, tokens


def test_transformers_generates_the_tokens_of_the_tier(core, exported):
    folder, prompts, tokens = exported
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = [generate_greedily(model, ids, core.family.end_token_ids) for ids in prompts]
    assert found == tokens


def genai_greedy(model: Path, prompts: list[list[int]], end_token_ids) -> list[list[int]]:
    """New tokens of each prompt from OpenVINO GenAI; skips where there is none."""
    python = os.environ.get("MFS_TRT_GENAI_PYTHON")
    if not python:
        pytest.skip(
            "optimum-intel 2.2.0, which exports for OpenVINO GenAI, requires transformers 5.5.4: "
            "it needs a Python of its own, which MFS_TRT_GENAI_PYTHON names"
        )
    task = {"model": str(model), "prompts": prompts, "max_tokens": MAX_TOKENS}
    task["end_token_ids"] = end_token_ids
    script = Path(__file__).parent.parent / "genai_greedy.py"
    done = subprocess.run(
        [python, script], input=json.dumps(task), text=True, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_openvino_genai_generates_the_tokens_of_the_tier(core, exported):
    folder, prompts, tokens = exported
    assert genai_greedy(folder, prompts, core.family.end_token_ids) == tokens


def test_openvino_genai_reads_the_gguf_export(core, smollm2_family, tmp_path):
    """It takes float16 files only: transformers runs the same rounded weights in float32."""
    reader = TierCheckpoint(WeightStore(smollm2_family), "large", "float16")
    write_gguf_checkpoint(reader, tmp_path / "large.gguf")
    write_hf_checkpoint(reader, tmp_path / "hf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    prompts = [core.tokenizer.encode(text) for text in TEXTS]
    ends = core.family.end_token_ids
    expected = [generate_greedily(model, ids, ends) for ids in prompts]
    assert genai_greedy(tmp_path / "large.gguf", prompts, ends) == expected


def test_transformers_reads_the_gguf_export_with_its_tokenizer(smollm2_family, tmp_path, core):
    pytest.importorskip("accelerate", reason="transformers reads GGUF files with it only")
    from transformers import AutoTokenizer

    reader = TierCheckpoint(WeightStore(smollm2_family), "small")
    write_gguf_checkpoint(reader, tmp_path / "small.gguf")
    write_hf_checkpoint(reader, tmp_path / "hf")
    read = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="small.gguf").state_dict()
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").state_dict()
    assert [name for name in expected if not torch.equal(expected[name], read[name])] == []
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, gguf_file="small.gguf")
    for text in TEXTS:
        assert tokenizer.encode(text) == core.tokenizer.encode(text)
