"""Greedy tokens from OpenVINO GenAI; run by the Python of an environment that has it.

Reads `{"model", "prompts", "max_tokens", "end_token_ids"}` as JSON from standard input. `model` is
a GGUF file (with float16 matrices), or a Hugging Face folder, which optimum-intel converts into
`model/ov`, in float32. The last line of its output is the list of each prompt's new tokens.
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import openvino as ov
import openvino_genai as genai


def main() -> None:
    task = json.load(sys.stdin)
    properties = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 1  # GiB
    path = model_path(Path(task["model"]))
    pipeline = genai.ContinuousBatchingPipeline(path, scheduler, "CPU", properties)
    config = genai.GenerationConfig()
    config.max_new_tokens = task["max_tokens"]
    config.do_sample = False
    config.eos_token_id = task["end_token_ids"][0]
    config.stop_token_ids = set(task["end_token_ids"])
    prompts = [ov.Tensor(np.asarray(ids, np.int64)[None]) for ids in task["prompts"]]
    results = pipeline.generate(prompts, [config] * len(prompts))
    print(json.dumps([list(map(int, result.m_generation_ids[0])) for result in results]))


def model_path(model: Path) -> str:
    """What GenAI loads; converted on first use."""
    target = model / "ov"
    if model.is_file():
        return str(model)
    if not target.exists():
        command = [str(Path(sys.executable).parent / "optimum-cli"), "export", "openvino"]
        command += ["--task", "text-generation-with-past", "--weight-format", "fp32"]
        subprocess.run([*command, "-m", str(model), str(target)], check=True, stdout=sys.stderr)
    return str(target)


if __name__ == "__main__":
    main()
