"""The table of operators: what it names exists."""

import importlib.util
import sys
from pathlib import Path

import pytest

from mfs_trt.plugins import reference
from mfs_trt.plugins.registry import OPERATORS, load_launcher

PERF = Path(__file__).parents[3] / "perf"


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_has_its_reference_and_its_launcher_by_name(name):
    assert OPERATORS[name].reference is getattr(reference, name)
    assert load_launcher(name).__name__ == name


def test_every_operator_names_a_benchmark(monkeypatch):
    monkeypatch.syspath_prepend(PERF)
    spec = importlib.util.spec_from_file_location("gpu_kernels", PERF / "gpu" / "kernels.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_kernels", module)
    spec.loader.exec_module(module)
    assert {operator.benchmark for operator in OPERATORS.values()} == set(module.BENCHMARKS)


def test_every_operator_has_a_plugin_of_its_name():
    for name, operator in OPERATORS.items():
        assert f"mfs::{name}" in operator.plugins
