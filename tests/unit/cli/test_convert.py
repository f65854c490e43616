import json

import pytest
import typer
from typer.testing import CliRunner

from mfs_trt.cli.convert import convert
from mfs_trt.cli.inspect import inspect
from mfs_trt.errors import CheckpointError, ConfigError
from mfs_trt.weights.store import WeightStore


@pytest.fixture
def run():
    app = typer.Typer()
    app.command()(convert)
    app.command()(inspect)

    def invoke(*words):
        result = CliRunner().invoke(app, [str(word) for word in words])
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == 0, result.output
        return result.output

    return invoke


def test_convert_writes_a_family_that_inspect_describes(run, hf_folder, tmp_path):
    output = run("convert", hf_folder("llama"), "--tiers", "2,4,6", "--out", tmp_path / "f")
    spec = WeightStore(tmp_path / "f").spec
    assert [tier.exit_layer for tier in spec.tiers] == [2, 4, 6]
    assert spec.revision[:12] in output
    table = run("inspect", tmp_path / "f", "--verify")
    for word in ("small", "medium", "large", "KV", "weights match the revision"):
        assert word in table


def test_source_without_tokenizer_is_said_to_have_none(run, hf_folder, tmp_path):
    assert "--tokenizer" in run("convert", hf_folder(), "--tiers", "1", "--out", tmp_path / "f")


def test_tokenizer_and_end_tokens_come_from_the_folder_given(run, hf_folder, tmp_path):
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "tokenizer.json").write_text("{}")
    (tmp_path / "t" / "config.json").write_text('{"model_type": "llama", "eos_token_id": 42}')
    run(
        *("convert", hf_folder(), "--tiers", "1", "--out", tmp_path / "f"),
        *("--tokenizer", tmp_path / "t"),
    )
    assert (tmp_path / "f" / "tokenizer.json").read_text() == "{}"
    assert json.loads((tmp_path / "f" / "config.json").read_text()) == {"model_type": "llama"}
    assert WeightStore(tmp_path / "f").spec.end_token_ids == (42,)


def test_tokenizer_folder_without_tokenizer_is_refused(run, hf_folder, tmp_path):
    (tmp_path / "t").mkdir()
    with pytest.raises(CheckpointError, match="expected tokenizer files"):
        run(
            "convert",
            hf_folder(),
            "--tiers",
            "1",
            "--out",
            tmp_path / "f",
            "--tokenizer",
            tmp_path / "t",
        )
    assert not (tmp_path / "f").exists()


def test_family_is_replaced_only_by_force(run, hf_folder, tmp_path):
    command = ("convert", hf_folder(), "--out", tmp_path / "f", "--tiers")
    run(*command, "3")
    with pytest.raises(ConfigError, match="--force"):
        run(*command, "2")
    run(*command, "2", "--force")
    assert len(WeightStore(tmp_path / "f").spec.tiers) == 2
