#!/bin/sh
# On a GPU machine: parity of the kernels with their references, their bandwidth against a copy's,
# and the `cuda` engine's tokens per second against transformers where a model is given.
# Usage: perf/gpu/run.sh OUT.json [FAMILY HF_FOLDER]      (PYTHON=… names the interpreter)
# Status: its parts were tried on the CPU; it has not run on a GPU.
# What the machine lacks is left out and named in the document; without a GPU nothing runs.
set -eu
usage='usage: perf/gpu/run.sh OUT.json [FAMILY HF_FOLDER]'
out=$(realpath "${1:?$usage}")
python=${PYTHON:-python}
if [ $# -gt 1 ]; then
    family=$(realpath "$2")
    hf_folder=$(realpath "${3:?$usage}")
fi
cd "$(dirname "$0")/../.."
export PYTHONPATH=perf
"$python" - <<'CHECK'
import importlib.util
import sys

import torch

if not torch.cuda.is_available():
    sys.exit(f"expected an NVIDIA GPU that torch can use; torch {torch.__version__} sees none")
if importlib.util.find_spec("triton") is None:
    sys.exit("expected OpenAI Triton: pip install triton")
CHECK
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# A kernel that is wrong is reported in the document, beside the figures of those that are right.
"$python" -m pytest -q -m gpu --junit-xml="$work/parity.xml" \
    tests/parity/test_kernels.py tests/unit/engine/test_cuda.py || true
set -- --parity "$work/parity.xml" --out "$out"
if [ -n "${family:-}" ]; then
    "$python" perf/gpu/engine.py "$family" "$hf_folder" --out "$work/engine.json" &&
        set -- "$@" --engine "$work/engine.json"
fi
"$python" perf/gpu/kernels.py "$@"
