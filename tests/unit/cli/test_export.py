import pytest
import typer
from typer.testing import CliRunner

from mfs_trt.checkpoint import open_checkpoint
from mfs_trt.cli.export import export
from mfs_trt.errors import ConfigError
from tiny_folders import folder_family, write_tiny_family


@pytest.fixture
def run(tmp_path):
    app = typer.Typer()
    app.command()(export)
    family = write_tiny_family(tmp_path / "family", folder_family((1, 2, 4)))

    def invoke(*words):
        result = CliRunner().invoke(app, [str(word) for word in (family, *words)])
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == 0, result.output
        return result.output

    return invoke


@pytest.mark.parametrize(("format", "out"), [("hf", "m"), ("gguf", "m.gguf"), ("trtllm", "m")])
def test_export_writes_the_tier_in_the_format_asked_for(run, tmp_path, format, out):
    output = run("--tier", "t1", "--format", format, "--out", tmp_path / out)
    assert "2 layers, float32" in " ".join(output.split())
    reader = open_checkpoint(tmp_path / out)
    assert reader.config.num_layers == 2
    kind = {"hf": "Hugging Face", "gguf": "GGUF", "trtllm": "TensorRT-LLM"}[format]
    assert reader.source.startswith(kind)


def test_deepest_tier_is_exported_by_default(run, tmp_path):
    run("--out", tmp_path / "m")
    assert open_checkpoint(tmp_path / "m").config.num_layers == 4


def test_unknown_format_is_refused_by_name(run, tmp_path):
    with pytest.raises(ConfigError, match="expected one of hf, gguf, trtllm, got 'onnx'"):
        run("--format", "onnx", "--out", tmp_path / "m")
