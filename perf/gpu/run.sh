#!/bin/sh
# On a GPU machine: parity of kernels and plans with their references, bandwidth of the kernels
# against a copy's, the `cuda` engine against transformers, TensorRT plans against the `cuda` engine.
# Usage: perf/gpu/run.sh OUT.json [FAMILY [HF_FOLDER]]      (PYTHON=… names the interpreter)
# What the machine or the arguments lack is left out and named in OUT.json; it is written anyway.
# Status: tried without a GPU; it has not run on one.
set -eu
usage='usage: perf/gpu/run.sh OUT.json [FAMILY [HF_FOLDER]]'
out=$(realpath -m "${1:?$usage}")
shift
if [ $# -gt 2 ]; then
    echo "$usage" >&2
    exit 2
fi
family=${1:+$(realpath "$1")}
hf_folder=${2:+$(realpath "$2")}
cd "$(dirname "$0")/../.."
export PYTHONPATH=perf
exec "${PYTHON:-python}" perf/gpu/run.py "$out" ${family:+"$family"} ${hf_folder:+"$hf_folder"}
