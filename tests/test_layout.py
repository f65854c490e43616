"""Imports obey the table of layers in pyproject.toml, and host logic runs without torch."""

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HOST_LOGIC = (
    "mfs_trt",
    "mfs_trt.errors",
    "mfs_trt.sampling_params",
    "mfs_trt.request",
    "mfs_trt.model_config",
    "mfs_trt.dtypes",
    "mfs_trt.family.costs",
    "mfs_trt.family.spec",
    "mfs_trt.family.tiers",
    "mfs_trt.engine.interface",
    "mfs_trt.engine.manifest",
    "mfs_trt.engine.tensorrt_api",
    "mfs_trt.engine.decode_buckets",
    "mfs_trt.engine.tensorrt_inputs",
    "mfs_trt.kv_cache.manager",
    "mfs_trt.scheduler.scheduler",
    "mfs_trt.scheduler.batch",
    "mfs_trt.scheduler.tier_policy",
    "mfs_trt.scheduler.policies",
    "mfs_trt.scheduler.finish_time",
    "mfs_trt.sampling.sampler",
)


@pytest.fixture
def installed_tree(tmp_path):
    """The packages as an installation lays them out: builder and plugins inside mfs_trt."""
    sources = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "mfs_trt", tmp_path / "mfs_trt", ignore=sources)
    for name in ("builder", "plugins", "model_repo"):
        shutil.copytree(ROOT / name, tmp_path / "mfs_trt" / name, ignore=sources)
    return tmp_path


def lint_imports(folder: Path) -> subprocess.CompletedProcess:
    code = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    return subprocess.run(
        [sys.executable, "-c", code, str(ROOT / "pyproject.toml"), "--no-cache", "--no-logo"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


def test_imports_obey_the_contracts(installed_tree):
    result = lint_imports(installed_tree)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("module", "line", "broken"),
    [
        ("kv_cache/block_pool.py", "import mfs_trt.scheduler.queue", "Imports point one way"),
        ("serving/core.py", "import mfs_trt.builder.build", "Only the command line"),
        ("plugins/reference.py", "import mfs_trt.errors", "Plugins import nothing"),
        ("request.py", "import torch", "Host logic is torch-free"),
    ],
)
def test_contracts_notice_a_forbidden_import(installed_tree, module, line, broken):
    path = installed_tree / "mfs_trt" / module
    path.write_text(f"{path.read_text()}\n{line}\n")
    result = lint_imports(installed_tree)
    assert result.returncode != 0
    assert any(row.startswith(broken) and "BROKEN" in row for row in result.stdout.splitlines())


def test_host_logic_imports_no_accelerator_or_model_library():
    heavy = ("torch", "transformers", "safetensors", "gguf", "tensorrt", "triton")
    code = f"import sys, {', '.join(HOST_LOGIC)}; print(set(sys.modules) & set({heavy!r}))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "set()", result.stdout + result.stderr


def test_an_installation_has_every_package():
    with (ROOT / "pyproject.toml").open("rb") as file:
        setuptools = tomllib.load(file)["tool"]["setuptools"]
    expected = set()
    for package, root in setuptools["package-dir"].items():
        for init in (ROOT / root).rglob("__init__.py"):
            inside = init.parent.relative_to(ROOT / root).parts
            expected.add(".".join((package, *inside)))
    assert set(setuptools["packages"]) == expected
