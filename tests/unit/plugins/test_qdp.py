"""TensorRT plugins, as far as the Python part of TensorRT goes without its library: definitions,
output shapes and types, aliases, kernels and launches.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mfs_trt.plugins import registry
from mfs_trt.plugins.triton_kernels.specialization import Specialization
from plugin_builds import CASES

TARGETS = (100,)  # where one kernel needs smaller tiles than asked for
DTYPES = {"HALF": torch.float16, "INT32": torch.int32, "FLOAT": torch.float32}


@pytest.fixture(scope="module")
def built() -> dict[str, dict]:
    script = Path(__file__).parents[2] / "plugin_builds.py"
    result = subprocess.run(
        [sys.executable, str(script), *map(str, TARGETS)],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.fixture(params=[f"{name} sm_{target}" for name in CASES for target in TARGETS])
def case(request, built):
    name = request.param.rsplit(" ", 1)[0]
    return CASES[name], built[request.param]


def test_every_plugin_of_the_table_is_built():
    named = {plugin for op in registry.OPERATORS.values() for plugin in op.plugins}
    assert named == {f"mfs::{case.plugin}" for case in CASES.values()}


def test_a_plugin_takes_the_types_it_is_called_with(case):
    assert case[1]["takes the types"]


def test_the_kernel_takes_inputs_then_integers_then_outputs(case):
    definition, result = case
    inputs, outputs = len(definition.inputs), len(result["outputs"])
    expected = ["u64"] * inputs + ["u32"] * len(result["integers"]) + ["u64"] * outputs
    assert result["parameters"] == expected


def test_the_kernel_assembles_and_needs_no_more_shared_memory_than_any_launch_has(case):
    assert case[1]["assembles"]
    assert case[1]["shared"] <= 48 << 10
    assert case[1]["threads"] in (128, 256)


def test_kv_write_aliases_its_caches_and_nothing_else_aliases(built):
    for name, result in built.items():
        if name == "layers":
            continue
        wanted = [3, 4] if name.startswith("kv_write") else [-1] * len(result["outputs"])
        assert result["aliases"] == wanted, name


def test_layers_of_an_operator_are_its_plugins_each_reading_the_one_before(built):
    added = built["layers"]
    assert {name: layers["plugins"] for name, layers in added.items()} == {
        "kv_write": ["kv_write"],
        "attention": ["paged_attention"],
        "split attention": ["paged_attention_split", "merge_splits"],
        "tier_exit": ["tier_exit"],
        "variant_delta": ["variant_project", "variant_delta"],
    }
    assert all(layers["is_chained"] and layers["gives_the_last"] for layers in added.values())


def tensors(name: str) -> list[torch.Tensor]:
    return [torch.zeros(shape, dtype=DTYPES[kind]) for kind, shape in CASES[name].inputs]


def attention(name: str) -> None:
    settings = dict(CASES[name].attributes)
    launcher = registry.load_launcher("paged_attention")
    launcher(
        *tensors(name),
        settings["scale"],
        settings["window"] or None,
        group=settings["group"],
        tile_rows=settings["tile_rows"],
        num_splits=settings.get("num_splits", 1),
    )


def delta() -> None:
    y, _, b, starts, runs = tensors("variant_delta")
    x, a, *_ = tensors("variant_project")
    registry.load_launcher("variant_delta")(y, x, a, b, starts, runs)


# case → how the launcher on torch tensors is called, and which of its launches it is.
LAUNCHES = {
    "paged_attention": (lambda: attention("paged_attention"), 0),
    "paged_attention_split": (lambda: attention("paged_attention_split"), 0),
    "merge_splits": (lambda: attention("paged_attention_split"), 1),
    "kv_write": (
        lambda: registry.load_launcher("kv_write")(*tensors("kv_write"), group=1),
        0,
    ),
    "tier_exit": (
        lambda: registry.load_launcher("tier_exit")(*tensors("tier_exit"), 1e-5),
        0,
    ),
    "variant_project": (delta, 0),
    "variant_delta": (delta, 1),
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_plugin_launches_as_the_launcher_on_torch_tensors_does(name, built, monkeypatch):
    launches = []

    def record(spec, grid, *arguments):
        launches.append((grid, arguments))

    monkeypatch.setattr(Specialization, "launch", record)
    call, index = LAUNCHES[name]
    call()
    grid, arguments = launches[index]
    result = built[f"{name} sm_{TARGETS[0]}"]
    assert result["grid"] == [*grid, 1, 1][:3]
    assert result["integers"] == [n for n in arguments if isinstance(n, int)]
    given = [list(t.shape) for t in arguments if isinstance(t, torch.Tensor)]
    inputs = [list(shape) for _, shape in CASES[name].inputs]
    assert given == inputs + [shape for _, shape in result["outputs"]]


def test_without_tensorrt_registering_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(ImportError, match="pip install 'tensorrt>=10.13'"):
        registry.register_plugins()
