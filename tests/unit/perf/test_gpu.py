"""perf/gpu: on a machine without a GPU the script says what it left out; its parts work."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tiny_folders import folder_family, write_tiny_family

ROOT = Path(__file__).parents[3]
PARTS = ("kernel_parity", "plan_parity", "plan_parity_full", "kernels")
PARTS += ("cuda_engine", "tensorrt_plans")


def run(*command: object, **environment: str) -> subprocess.CompletedProcess:
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHON": sys.executable,
        **environment,
    }
    return subprocess.run(
        list(map(str, command)), cwd=ROOT, env=environment, text=True, capture_output=True
    )


@pytest.fixture(scope="module")
def family(tmp_path_factory) -> Path:
    return write_tiny_family(tmp_path_factory.mktemp("family") / "f", folder_family((1, 2)))


@pytest.fixture
def runner(monkeypatch):
    """perf/gpu/run.py as a module."""
    monkeypatch.syspath_prepend(ROOT / "perf")
    spec = importlib.util.spec_from_file_location("gpu_run", ROOT / "perf/gpu/run.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_run", module)
    spec.loader.exec_module(module)
    return module


def test_without_a_gpu_the_document_says_what_was_left_out_and_why(tmp_path, family):
    done = run("sh", "perf/gpu/run.sh", tmp_path / "out.json", family)
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "out.json").read_text())
    assert json.loads(done.stdout.splitlines()[-1]) == document
    assert document["benchmark"] == "gpu" and document["gpu"] is None
    for name in PARTS:
        assert document[name]["left_out"].startswith("expected an NVIDIA GPU that torch can use")


def test_usage_without_an_output_file_is_told():
    done = run("sh", "perf/gpu/run.sh")
    assert done.returncode != 0 and "usage: perf/gpu/run.sh OUT.json" in done.stderr


def test_part_names_the_first_thing_that_it_lacks(runner, monkeypatch):
    monkeypatch.setattr(runner, "gpu", lambda: "")
    parts = {part.name: part for part in runner.make_parts(None, None)}
    assert tuple(parts) == PARTS
    assert runner.run_part(parts["cuda_engine"]) == {
        "left_out": "expected FAMILY on the command line"
    }
    parts = {part.name: part for part in runner.make_parts(Path("f"), None)}
    assert runner.run_part(parts["cuda_engine"]) == {
        "left_out": "expected HF_FOLDER on the command line"
    }
    monkeypatch.setattr(runner.importlib.util, "find_spec", lambda name: None)
    missing = runner.run_part(parts["tensorrt_plans"])["left_out"]
    assert missing == "expected the Python package triton"


def test_part_that_fails_says_its_last_line(runner):
    def command(code: str):
        return lambda out: [sys.executable, "-c", code, str(out)]

    read = runner.read_json
    fails = runner.Part("p", command("raise SystemExit('no room')"), (), read)
    assert runner.run_part(fails) == {"failed": "no room"}
    writes = "import sys; open(sys.argv[1], 'w').write('{\"a\": 1}')"
    assert runner.run_part(runner.Part("p", command(writes), (), read)) == {"a": 1}
    both = command(f"{writes}; sys.exit('late')")
    assert runner.run_part(runner.Part("p", both, (), read)) == {"failed": "late"}
    assert runner.run_part(runner.Part("p", both, (), read, False)) == {"a": 1}


def test_parity_counts_are_those_of_the_tests_and_names_what_failed(runner, tmp_path):
    (tmp_path / "test_two.py").write_text(
        "def test_right(): pass\ndef test_wrong(): assert False\n", encoding="utf-8"
    )
    report = tmp_path / "report.xml"
    plain = ["-c", os.devnull, "-p", "no:cacheprovider", f"--rootdir={tmp_path}"]
    run(sys.executable, "-m", "pytest", *plain, f"--junit-xml={report}", tmp_path / "test_two.py")
    assert runner.read_parity(report) == {
        "tests": 2,
        "failures": 1,
        "errors": 0,
        "skipped": 0,
        "failed": ["test_wrong"],
    }


def test_plans_script_measures_every_tier_and_says_what_does_not_fit(tmp_path, family):
    """On the CPU, the reference engine against itself."""
    same = ["--targets", "reference", "--peer", "reference", "--dtype", "float32"]
    sizes = ["--memory", "512KiB", "--batches", "1", "2", "--lengths", "40", "900", "--rounds", "2"]
    out = tmp_path / "plans.json"
    script = ("perf/gpu/plans.py", family, *same, *sizes, "--out", out)
    done = run(sys.executable, *script, PYTHONPATH="perf")
    assert done.returncode == 0, done.stderr
    figures = json.loads(out.read_text())["reference"]
    assert set(figures) == {
        f"{batch} requests of {length}, t{tier}"
        for batch in (1, 2)
        for length in (40, 900)
        for tier in (0, 1)
    }
    assert figures["2 requests of 40, t1"]["ms"]["n"] == 2
    assert "KV arena is too small" in figures["2 requests of 900, t1"]["left_out"]
