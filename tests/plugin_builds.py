"""Plugins as TensorRT builds them: `tensorrt.plugin`'s own calls, in TensorRT's order, for one set
of shapes each; the PTX is assembled for its GPU.

Run as a program, since kernels are compiled here and interpreted in the tests' process. Prints one
JSON document: case → what came out.
"""

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from plugin_networks import describe_plugin

HALF, INT, WIDE = "HALF", "INT32", "FLOAT"


@dataclass(frozen=True)
class Case:
    plugin: str
    inputs: tuple[tuple[str, tuple[int, ...]], ...]  # type, shape
    attributes: dict[str, Any]


_ATTENTION_INPUTS = (
    (HALF, (70, 8, 128)),
    *((HALF, (33, 2, 32, 128)),) * 2,
    (INT, (3, 5, 2)),
    (INT, (4,)),
    (INT, (3,)),
)
_ATTENTION = {"group": 1, "window": 0, "scale": 128**-0.5}
_RUNS = ((INT, (6,)), (INT, (5,)))
CASES = {
    "paged_attention": Case("paged_attention", _ATTENTION_INPUTS, {**_ATTENTION, "tile_rows": 16}),
    "paged_attention large": Case(
        "paged_attention", _ATTENTION_INPUTS, {**_ATTENTION, "tile_rows": 64}
    ),
    "paged_attention_split": Case(
        "paged_attention_split",
        _ATTENTION_INPUTS,
        {**_ATTENTION, "tile_rows": 16, "num_splits": 3},
    ),
    "merge_splits": Case(
        "merge_splits",
        ((WIDE, (3, 70, 8, 128)), (WIDE, (3, 70, 8))),
        {"dtype": "float16", "num_splits": 3},
    ),
    "kv_write": Case(
        "kv_write",
        (*((HALF, (70, 2, 128)),) * 2, (INT, (70, 2)), *((HALF, (33, 2, 32, 128)),) * 2),
        {"group": 1},
    ),
    "tier_exit": Case(
        "tier_exit",
        ((HALF, (70, 576)), (INT, (4,)), (INT, (4,)), (HALF, (3, 576))),
        {"eps": 1e-5},
    ),
    "variant_project": Case(
        "variant_project", ((HALF, (70, 1100)), (HALF, (3, 1100, 70)), *_RUNS), {"in_size": 1100}
    ),
    "variant_delta": Case(
        "variant_delta",
        ((HALF, (70, 130)), (WIDE, (2, 70, 70)), (HALF, (3, 70, 130)), *_RUNS),
        {"in_size": 1100},
    ),
}


def build(trt: Any, op: Any, case: Case, compute_capability: int) -> dict[str, Any]:
    """One plugin from creation to kernel."""
    attributes = {**case.attributes, "compute_capability": compute_capability}
    tensors = [trt.ITensor() for _ in case.inputs]
    create = getattr(op, case.plugin)(*tensors, **attributes)
    plugin = create(trt.QuickPluginCreationRequest.STRICT_AOT)[2]
    types = [trt.DataType[name] for name, _ in case.inputs]
    shapes = [shape for _, shape in case.inputs]
    described = describe_plugin(trt, plugin, types, shapes)
    all_descs, count = described.descriptions, len(shapes)
    exprs = [[trt.IDimensionExpr(n) for n in shape] for shape in shapes]
    plugin.configure_plugin(all_descs[:count], all_descs[count:])
    plugin.set_tactic(0)
    launch, integers = SimpleNamespace(), trt.SymExprSetter()
    plugin.get_launch_params(exprs, all_descs, count, launch, integers, trt.ExprBuilder())
    descs = [desc.desc for desc in all_descs]
    name, ptx = plugin.get_kernel(descs[:count], descs[count:])
    return {
        "takes the types": described.takes_the_types,
        "outputs": [
            [kind.name, list(shape)]
            for kind, shape in zip(described.output_types, described.output_shapes, strict=True)
        ],
        "aliases": described.aliases,
        "grid": [launch.grid_x.expr.value, launch.grid_y.expr.value, launch.grid_z.expr.value],
        "threads": launch.block_x.expr.value,
        "shared": launch.shared_mem.expr.value,
        "integers": [integer.expr.value for integer in integers],
        "parameters": re.findall(r"\.param \.(u\d+)", ptx.decode().split(")")[0]),
        "entry": name,
        "assembles": assembles(ptx, compute_capability),
    }


class Network:
    """Takes plugins as a network does, and names them with what they read and give."""

    def __init__(self, trt: Any) -> None:
        self._trt, self.plugins = trt, []

    def add_plugin(self, create: Any) -> Any:
        inputs, _, plugin = create(self._trt.QuickPluginCreationRequest.STRICT_AOT)
        outputs = [self._trt.ITensor() for _ in range(plugin.num_outputs)]
        self.plugins.append((plugin.plugin_name, inputs, outputs))
        return SimpleNamespace(get_output=outputs.__getitem__)


def chains(trt: Any) -> dict[str, Any]:
    """What `trt_layers` adds for each operator: plugins, and whether each reads the one before."""
    from mfs_trt.plugins import trt_layers

    attention = {"dtype": "float16", "group": 0, "scale": 0.1, "window": None, "tile_rows": 16}
    calls = {
        "kv_write": (trt_layers.add_kv_write, 5, {"group": 0}),
        "attention": (trt_layers.add_paged_attention, 6, {**attention, "num_splits": 1}),
        "split attention": (trt_layers.add_paged_attention, 6, {**attention, "num_splits": 4}),
        "tier_exit": (trt_layers.add_tier_exit, 4, {"eps": 1e-5}),
        "variant_delta": (trt_layers.add_variant_delta, 6, {"in_size": 64}),
    }
    added = {}
    for name, (add, num_tensors, settings) in calls.items():
        network = Network(trt)
        tensors = [trt.ITensor() for _ in range(num_tensors)]
        result = add(network, *tensors, **settings, compute_capability=90)
        results = list(result) if isinstance(result, tuple) else [result]
        steps = zip(network.plugins, network.plugins[1:], strict=False)
        added[name] = {
            "plugins": [plugin for plugin, _, _ in network.plugins],
            "is_chained": all(
                all(out in following[1] for out in step[2]) for step, following in steps
            ),
            "gives_the_last": results == network.plugins[-1][2],
        }
    return added


def assembles(ptx: bytes, compute_capability: int) -> bool:
    from triton import knobs

    suffix = "a" if compute_capability >= 90 else ""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_bytes(ptx)
        ptxas = knobs.nvidia.ptxas if compute_capability < 100 else knobs.nvidia.ptxas_blackwell
        command = [ptxas.path, f"--gpu-name=sm_{compute_capability}{suffix}", str(source)]
        output = ["-o", str(source.with_suffix(".cubin"))]
        return subprocess.run([*command, *output], capture_output=True).returncode == 0


def main() -> None:
    from mfs_trt.plugins.registry import register_plugins
    from tensorrt_stand_in import real_plugin_package

    with real_plugin_package() as trtp:
        register_plugins()
        trt = sys.modules["tensorrt"]
        built = {
            f"{name} sm_{target}": build(trt, trtp.op.mfs, case, target)
            for target in map(int, sys.argv[1:])
            for name, case in CASES.items()
        }
        built["layers"] = chains(trt)
    print(json.dumps(built))


if __name__ == "__main__":
    main()
