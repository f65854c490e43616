"""Ahead-of-time compilation of kernels: no GPU is asked for, and none is needed.

`python -m mfs_trt.plugins.compile` compiles every kernel for every target and prints what the
machine code uses. Not where kernels are interpreted (`TRITON_INTERPRET=1`).
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mfs_trt.plugins.triton_kernels.specialization import Specialization

TARGETS = (80, 86, 89, 90, 100, 120)  # compute capability times ten


@dataclass(frozen=True)
class CompiledKernel:
    """Machine code of one kernel for one target, and what a launch needs."""

    name: str  # of the entry point
    ptx: str
    cubin: bytes
    num_threads: int
    shared_nbytes: int  # dynamic shared memory of a launch
    compute_capability: int


@dataclass(frozen=True)
class Usage:
    """What the machine code uses, a thread or a block; a spill lies on the stack."""

    registers: int
    stack_nbytes: int
    shared_nbytes: int


def compile_kernel(spec: Specialization, compute_capability: int) -> CompiledKernel:
    """Compile for `compute_capability` (80, 86, …). The PTX takes `spec.parameters` and no others.

    Raises `RuntimeError` where kernels are interpreted in this process, or when one needs memory
    that a caller other than OpenAI Triton does not provide.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if not isinstance(spec.kernel, triton.JITFunction):
        raise RuntimeError("kernels are interpreted in this process: unset TRITON_INTERPRET")
    names = spec.kernel.arg_names
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if spec.parameters.get(name, "").startswith("*")
    }
    source = ASTSource(
        fn=spec.kernel,
        signature={name: spec.parameters.get(name, "constexpr") for name in names},
        constexprs=dict(spec.constants),
        attrs=aligned,
    )
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", compute_capability, 32),
        options={"num_warps": spec.num_warps, "num_stages": spec.num_stages},
    )
    metadata = compiled.metadata
    if metadata.global_scratch_size or metadata.profile_scratch_size:
        raise RuntimeError(
            f"{metadata.name}: expected a kernel without scratch memory, "
            f"got {metadata.global_scratch_size} bytes"
        )
    return CompiledKernel(
        name=metadata.name,
        ptx=without_scratch_parameters(compiled.asm["ptx"], len(spec.parameters)),
        cubin=compiled.asm["cubin"],
        num_threads=metadata.num_warps * 32,
        shared_nbytes=metadata.shared,
        compute_capability=compute_capability,
    )


def without_scratch_parameters(ptx: str, num_parameters: int) -> str:
    """PTX whose entry point takes the kernel's own parameters alone.

    OpenAI Triton adds two pointers to scratch memory, which TensorRT would leave unset.
    """
    entry = re.search(r"\.visible \.entry \w+\(\n(.*?)\n\)", ptx, re.DOTALL)
    assert entry is not None, ptx[:400]
    declared = entry[1].split(",\n")
    assert len(declared) == num_parameters + 2, declared
    for parameter in declared[num_parameters:]:
        name = parameter.split()[-1]
        assert ptx.count(name) == 1, f"{name} is used, but its kernel has no scratch memory"
    kept = ",\n".join(declared[:num_parameters])
    return ptx[: entry.start(1)] + kept + ptx[entry.end(1) :]


def read_usage(kernel: CompiledKernel) -> Usage:
    """Read back from the machine code with the `cuobjdump` that OpenAI Triton ships."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(kernel.cubin)
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    fields = dict(re.findall(r"(\w+):(\d+)", text[text.index("REG:") :]))
    return Usage(
        registers=int(fields["REG"]),
        stack_nbytes=int(fields["STACK"]) + int(fields["LOCAL"]),
        shared_nbytes=int(fields["SHARED"]) + kernel.shared_nbytes,
    )


def usage_rows(
    specs: Mapping[str, Specialization], targets: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """One row for each kernel and target: kernel, target, registers, stack and shared bytes."""
    for name, spec in specs.items():
        for target in targets:
            usage = read_usage(compile_kernel(spec, target))
            yield {"kernel": name, "target": target, **asdict(usage)}


def main() -> None:
    from mfs_trt.plugins.triton_kernels.shapes import compiled_shapes

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", type=int, nargs="+", default=list(TARGETS))
    parser.add_argument("--json", action="store_true", help="one JSON document instead of a table")
    args = parser.parse_args()
    rows = list(usage_rows(compiled_shapes(), args.targets))
    if args.json:
        json.dump(rows, sys.stdout)
        return
    print(f"{'kernel':48} {'target':>6} {'registers':>9} {'stack':>6} {'shared':>7}")
    for row in rows:
        print(
            f"{row['kernel']:48} {row['target']:6} {row['registers']:9} "
            f"{row['stack_nbytes']:6} {row['shared_nbytes']:7}"
        )


if __name__ == "__main__":
    main()
