"""Resident memory of an engine of all tiers, against its bound and against separate pipelines of a
peer.

Each engine is loaded and decodes in a fresh process; the KV arena counts as its touched pages only,
so a small one is asked for. The peers are OpenVINO GenAI pipelines, one process with one pipeline
for each model folder given. Usage: python perf/memory.py ENGINE [--peer-python PYTHON --peer-models
FOLDER …] [--out FILE]
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from report import finish, show

CHILD = """
import sys
from pathlib import Path

def status(name):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024

{body}
print(status("VmRSS"), status("VmHWM"))
"""
OURS = """
from mfs_trt.engine import load_engine
from mfs_trt.request import PromptRequest
from mfs_trt.sampling_params import SamplingParams
from mfs_trt.serving.core import EngineCore
core = EngineCore(load_engine(sys.argv[1]), tokenizer=None)
for tier in core.family.tiers:
    params = SamplingParams(max_tokens=8)
    request = PromptRequest(tier.name, params, token_ids=range(5, 69), tier=tier.name)
    for sequence in core.make_requests(request):
        core.add(sequence)
while core.has_requests:
    core.step()
"""
PEERS = """
import numpy as np
import openvino as ov
import openvino_genai as genai
pipelines = []
for folder in sys.argv[1:]:
    scheduler = genai.SchedulerConfig()
    scheduler.num_kv_blocks = 64
    properties = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    pipelines.append(genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", properties))
    config = genai.GenerationConfig()
    config.max_new_tokens = 8
    pipelines[-1].add_request(0, ov.Tensor(np.arange(5, 69, dtype=np.int64)[None]), config)
    while pipelines[-1].has_non_finished_requests():
        pipelines[-1].step()
"""


def measure(python: str, body: str, arguments: list[str]) -> tuple[int, int]:
    """Resident bytes after decoding, and their peak."""
    command = [python, "-c", CHILD.replace("{body}", body), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    resident, peak = done.stdout.split()[-2:]
    return int(resident), int(peak)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--peer-python")
    parser.add_argument("--peer-models", nargs="*", default=[])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    manifest = json.loads((args.engine / "engine.json").read_text())
    family = Path(manifest["family"])
    weights = sum(p.stat().st_size for p in family.glob("*.safetensors"))
    if manifest["weight_format"] or manifest["dtype"] != "float32":
        weights = sum(p.stat().st_size for p in args.engine.glob("*.bin"))
    resident, peak = measure(sys.executable, OURS, [str(args.engine)])
    bound = int(1.15 * weights + 300e6)
    result = {
        "benchmark": "memory",
        "weights_nbytes": weights,
        "resident_nbytes": resident,
        "peak_nbytes": peak,
        "bound_nbytes_beside_arena": bound,
    }
    rows = [("engine of all tiers", resident / 1e6, peak / 1e6, resident / bound)]
    if args.peer_python:
        theirs, their_peak = measure(args.peer_python, PEERS, args.peer_models)
        result |= {"peer_resident_nbytes": theirs, "peer_peak_nbytes": their_peak}
        result["peer_over_ours"] = theirs / resident
        count = f"{len(args.peer_models)} GenAI pipelines"
        rows.append((count, theirs / 1e6, their_peak / 1e6, theirs / resident))
    columns = ["what", "resident MB", "peak MB", "over bound; over ours"]
    show("resident memory after decoding", columns, rows)
    finish(result, args.out)


if __name__ == "__main__":
    main()
