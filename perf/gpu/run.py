"""All checks and measurements for a GPU machine, those it can do, in one JSON document.

Parts: parity of the kernels, the `cuda` engine and TensorRT's plans with their references (tests
marked gpu); bandwidth of the kernels against a copy's; tokens per second of the `cuda` engine
against transformers; steps of TensorRT plans against the `cuda` engine. Each runs in a process of
its own. What the machine or the command line lacks for a part stands in its place, as `left_out`.
Exit status 1 where a part that ran has failed.
Usage: see run.sh
Status: tried without a GPU, where every part is left out; it has not run on a GPU.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from report import finish

ROOT = Path(__file__).parents[2]
TESTS = ("tests/parity/test_kernels.py", "tests/unit/engine/test_cuda.py")
TENSORRT_MODULES = ("tensorrt", "tensorrt_rtx_bindings", "tensorrt_rtx")


@dataclass(frozen=True)
class Part:
    """`command(out)` writes its document to `out`; `needs` say what is missing, or nothing."""

    name: str
    command: Callable[[Path], list[str]]
    needs: tuple[Callable[[], str], ...]
    read: Callable[[Path], dict[str, Any]]
    fails_by_status: bool = True  # else its document tells


def gpu() -> str:
    if torch.cuda.is_available():
        return ""
    return f"an NVIDIA GPU that torch can use; torch {torch.__version__} sees none"


def module(*names: str) -> Callable[[], str]:
    """One of the modules."""

    def missing() -> str:
        found = any(importlib.util.find_spec(name) is not None for name in names)
        return "" if found else f"the Python package {' or '.join(names)}"

    return missing


def given(path: Path | None, name: str) -> Callable[[], str]:
    return lambda: "" if path is not None else f"{name} on the command line"


def read_parity(path: Path) -> dict[str, Any]:
    """Counts of a JUnit document, and the names of what failed."""
    suite = next(ElementTree.parse(path).getroot().iter("testsuite"))
    counts = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    failed = [
        case.get("name")
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    return {**counts, "failed": failed}


def read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def make_parts(family: Path | None, hf_folder: Path | None) -> list[Part]:
    python, kernels = sys.executable, (gpu, module("triton"))

    def tests(marks: str, *files: str) -> Callable[[Path], list[str]]:
        start = [python, "-m", "pytest", "-q", "-m", marks]
        return lambda out: [*start, f"--junit-xml={out}", *files]

    def script(name: str, *arguments: Any) -> Callable[[Path], list[str]]:
        start = [python, f"perf/gpu/{name}", *map(str, arguments)]
        return lambda out: [*start, "--out", str(out)]

    with_family = (*kernels, given(family, "FAMILY"))
    rtx = (gpu, module(*TENSORRT_MODULES[1:]))
    plans = ("tests/parity/test_tensorrt.py", "tests/parity/test_tensorrt_weights.py")
    return [
        Part("kernel_parity", tests("gpu", *TESTS), kernels, read_parity, False),
        Part("plan_parity", tests("gpu and not trt", *plans), rtx, read_parity, False),
        Part(
            "plan_parity_full",
            tests("gpu and trt", *plans),
            (gpu, module("tensorrt")),
            read_parity,
            False,
        ),
        Part("kernels", script("kernels.py"), kernels, read_json),
        Part(
            "cuda_engine",
            script("engine.py", family, hf_folder),
            (*with_family, given(hf_folder, "HF_FOLDER"), module("transformers")),
            read_json,
        ),
        Part(
            "tensorrt_plans",
            script("plans.py", family),
            (*with_family, module(*TENSORRT_MODULES)),
            read_json,
        ),
    ]


def run_part(part: Part) -> dict[str, Any]:
    """Its document; or `left_out` and what is missing; or `failed` and the last line it wrote."""
    missing = next((text for need in part.needs if (text := need())), "")
    if missing:
        return {"left_out": f"expected {missing}"}
    print(f"-- {part.name}", flush=True)
    environment = {**os.environ, "PYTHONPATH": "perf"}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "document"
        done = subprocess.run(
            part.command(out), cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
        )
        sys.stderr.write(done.stderr)
        if not out.exists() or (part.fails_by_status and done.returncode):
            lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
            return {"failed": lines[-1]}
        return part.read(out)


def about_gpu() -> dict[str, Any]:
    if gpu():
        return {"gpu": None}
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "memory_nbytes": properties.total_memory,
        "cuda": torch.version.cuda,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("family", type=Path, nargs="?")
    parser.add_argument("hf_folder", type=Path, nargs="?")
    args = parser.parse_args()
    parts = make_parts(args.family, args.hf_folder)
    documents = {part.name: run_part(part) for part in parts}
    finish({"benchmark": "gpu", "torch": torch.__version__, **about_gpu(), **documents}, args.out)
    if any("left_out" not in d and d.get("failed") for d in documents.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
