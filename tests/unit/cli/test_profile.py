import json

import pytest
import typer
from typer.testing import CliRunner

from hf_models import make_hf_folder
from mfs_trt.cli.profile import profile
from mfs_trt.errors import ConfigError
from mfs_trt.family.tiers import parse_tiers
from tiny_folders import folder_family, write_tiny_family
from tiny_tokenizers import build_tokenizer


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    folder = tmp_path_factory.mktemp("profile") / "family"
    write_tiny_family(folder, folder_family((4, 8), vocab_size=512))
    build_tokenizer("byte_level", folder)
    (folder.parent / "text.txt").write_text("One two three four five six seven.\n" * 20)
    return folder


@pytest.fixture
def run(family, tmp_path):
    app = typer.Typer()
    app.command()(profile)

    def invoke(*words):
        fast = ["--target", "reference", "--prompt-tokens", 8, "--output-tokens", 2, "--rounds", 1]
        command = [family, "--out", tmp_path / "profile", *fast, *words]
        result = CliRunner().invoke(app, [str(word) for word in command])
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == 0, result.output
        return result.output, json.loads((tmp_path / "profile" / "profile.json").read_text())

    return invoke


def test_profile_measures_every_depth_and_proposes_tiers(run, family, tmp_path):
    output, found = run("--data", family.parent / "text.txt", "--seq-length", 32)
    assert [row["num_layers"] for row in found["depths"]] == list(range(1, 9))
    assert all(row["loss"] > 0 and row["decode_ms"] > 0 for row in found["depths"])
    assert [row["acceptance"] is None for row in found["depths"]] == [False] * 7 + [True]
    assert found["exits"] == [2, 4, 6, 8]
    assert found["group_size"] == 2
    assert parse_tiers(found["tiers"], 8)[0].name == "draft"
    assert found["tiers"] in output
    assert (tmp_path / "profile" / "profile.png").read_bytes().startswith(b"\x89PNG")


def test_speed_that_the_whole_model_has_needs_no_tier(run):
    _, found = run("--tokens-per-s", 0.001)
    assert found["wanted"] == [{"reason": "0.001 tokens/s", "depth": 8.0}]
    assert found["exits"] == [2, 8]
    assert "loss" not in found["depths"][0]


def test_speed_that_nothing_reaches_is_said_and_proposes_no_tier(run):
    output, found = run("--tokens-per-s", 1e9)
    assert "1e+09 tokens/s: not even one layer is so fast here" in " ".join(output.split())
    assert found["exits"] == [2, 8]


def test_model_to_be_as_fast_as_is_measured_too(run, tmp_path):
    big = {"num_hidden_layers": 40, "vocab_size": 512}  # slower than the whole family
    other = make_hf_folder(tmp_path / "other", "llama", **big)
    _, found = run("--like", other)
    assert found["wanted"] == [{"reason": "as fast as other", "depth": 8.0}]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--output-tokens", 1), "output_tokens: expected at least 2"),
        (("--rounds", 0), "rounds: expected at least 1"),
        (("--tokens-per-s", -1), "tokens_per_s: expected above 0"),
    ],
)
def test_settings_that_measure_nothing_are_refused(run, words, message):
    with pytest.raises(ConfigError, match=message):
        run(*words)
