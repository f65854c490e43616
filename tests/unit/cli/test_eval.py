import json

import pytest
import torch
import typer
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from mfs_trt.cli.eval import GATES_FAILED, evaluate
from mfs_trt.errors import ConfigError
from tiny_folders import folder_family, write_tiny_family
from tiny_tokenizers import build_tokenizer

TEXT = "One two three four five six seven eight nine ten.\n" * 40


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eval") / "family"
    write_tiny_family(folder, folder_family((1, 2, 4), vocab_size=512))
    build_tokenizer("byte_level", folder)
    (folder.parent / "text.txt").write_text(TEXT)
    return folder


@pytest.fixture
def run(family, tmp_path):
    app = typer.Typer()
    app.command("eval")(evaluate)

    def invoke(*words):
        command = [family, "--data", family.parent / "text.txt", "--out", tmp_path / "report"]
        command += ["--seq-length", 32, *words]
        result = CliRunner().invoke(app, [str(word) for word in command])
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return invoke


def test_report_holds_figures_plots_and_a_page_for_people(run, tmp_path):
    result = run("--gate", "loss.t2>=0")
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    assert [row["tier"] for row in report["tiers"]] == ["t0", "t1", "t2"]
    assert report["metrics"]["loss.t1"] == report["tiers"][1]["loss"]
    assert report["gates"] == [
        {"gate": "loss.t2 >= 0", "value": report["metrics"]["loss.t2"], "is_passed": True}
    ]
    assert report["is_passed"]
    page = (tmp_path / "report" / "report.md").read_text()
    for word in (f"{report['tiers'][0]['loss']:.4f}", "loss.png", "acceptance.png", "pass"):
        assert word in page
    for name in ("loss.png", "acceptance.png"):
        assert (tmp_path / "report" / name).read_bytes().startswith(b"\x89PNG")


def test_gate_that_is_not_met_ends_with_its_own_status_and_still_writes(run, tmp_path):
    result = run("--gate", "loss.t2>=0", "--gate", "loss.t0<=0.5")
    assert result.exit_code == GATES_FAILED
    assert "FAIL" in result.output
    assert "FAIL" in (tmp_path / "report" / "report.md").read_text()


def test_change_is_measured_against_the_baseline(run, family, tmp_path):
    run()
    (tmp_path / "report").rename(tmp_path / "before")
    weights = load_file(family / "base.safetensors")
    before = weights["exits.1.norm.weight"].clone()
    try:
        weights["exits.1.norm.weight"] = torch.zeros_like(before)
        save_file(weights, family / "base.safetensors")
        result = run(
            *("--baseline", tmp_path / "before", "--gate", "change.loss.t2<=1e-9"),
            *("--gate", "change.loss.t2>=-1e-9", "--gate", "change.loss.t0>=1e-9"),
        )
    finally:
        weights["exits.1.norm.weight"] = before
        save_file(weights, family / "base.safetensors")
    # A uniform guess is better than a random tier's: the changed tier's loss falls, no other's.
    assert [line.split()[0] for line in result.output.splitlines() if "change.loss" in line] == [
        "pass",
        "pass",
        "FAIL",
    ]


def test_context_beyond_the_models_is_refused(run):
    with pytest.raises(ConfigError, match="seq_length: expected at most the model's 256, got 512"):
        run("--seq-length", 512)


def test_baseline_that_is_no_report_is_refused(run, family):
    with pytest.raises(ConfigError, match="expected a report"):
        run("--baseline", family)


def test_gate_is_checked_before_any_work(run):
    with pytest.raises(ConfigError, match="gate: "):
        run("--gate", "nonsense", "--data", "/nowhere")
