import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoTokenizer

from mfs_trt.checkpoint.hf import HfCheckpoint
from mfs_trt.checkpoint.hf_config import config_from_hf, config_to_hf
from mfs_trt.checkpoint.hf_writer import write_hf_checkpoint
from mfs_trt.errors import CheckpointError, ConfigError, FamilyError
from mfs_trt.model_config import RopeConfig
from mfs_trt.weights.store import WeightStore
from mfs_trt.weights.tier import TierCheckpoint
from tiny import tiny_config
from tiny_folders import folder_family, write_tiny_family
from tiny_tokenizers import build_tokenizer

ROPES = [
    RopeConfig(),
    RopeConfig(5e5, "linear", {"factor": 2.0}),
    RopeConfig(1e4, "dynamic", {"factor": 2.0}),
    RopeConfig(1e4, "yarn", {"factor": 4.0, "original_max_position_embeddings": 64}),
    RopeConfig(
        1e4,
        "longrope",
        {
            "short_factor": [1.0, 2.0, 3.0],
            "long_factor": [2.0, 3.0, 4.0],
            "original_max_position_embeddings": 64,
        },
    ),
]


@pytest.fixture
def store(tmp_path):
    return WeightStore(write_tiny_family(tmp_path / "family", folder_family((1, 2, 4))))


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope.scaling_type)
def test_rope_settings_return_from_config_json(rope):
    config = tiny_config(rope=rope)
    data = json.loads(json.dumps(config_to_hf(config, "float32")))
    assert config_from_hf(data) == config


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope.scaling_type)
def test_rope_settings_return_from_the_older_spelling(rope):
    config = tiny_config(rope=rope)
    data = config_to_hf(config, "float32")
    del data["rope_parameters"]
    assert config_from_hf(data) == config


def test_window_is_stated_for_engines_that_read_no_layer_types():
    windows = {"sliding_window": 5, "windowed_layers": (2, 3)}
    data = config_to_hf(tiny_config(architecture="qwen2", qkv_bias=True, **windows), "float32")
    del data["layer_types"]
    assert data["max_window_layers"] == 2
    assert config_from_hf(data).windowed_layers == (2, 3)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"qkv_bias": True}, "llama config.json cannot express qkv_bias True"),
        ({"architecture": "mistral", "mlp_bias": True}, "mistral .* mlp_bias True"),
        (
            {"architecture": "mistral", "sliding_window": 4, "windowed_layers": (0,)},
            r"mistral .* windowed_layers \(0,\)",
        ),
    ],
)
def test_what_config_json_cannot_express_is_named(overrides, words):
    with pytest.raises(CheckpointError, match=words):
        config_to_hf(tiny_config(**overrides), "float32")


def test_end_tokens_and_tokenizer_of_the_family_come_along(tmp_path, store):
    build_tokenizer("byte_level", store.folder)
    (store.folder / "generation_config.json").write_text('{"temperature": 0.5, "eos_token_id": 7}')
    store.spec = replace(store.spec, end_token_ids=(2, 9))
    write_hf_checkpoint(TierCheckpoint(store, "t1"), tmp_path / "out")
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation == {"temperature": 0.5, "eos_token_id": [2, 9]}
    assert HfCheckpoint(tmp_path / "out").end_token_ids == (2, 9)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == [2, 9]
    ours, theirs = (AutoTokenizer.from_pretrained(f) for f in (store.folder, tmp_path / "out"))
    assert theirs.encode("Hello world, 123") == ours.encode("Hello world, 123")


def test_family_without_end_tokens_gives_none_not_those_of_llama(tmp_path, store):
    write_hf_checkpoint(TierCheckpoint(store, "t1"), tmp_path / "out")
    assert HfCheckpoint(tmp_path / "out").end_token_ids == ()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["bos_token_id"] is None


def test_dtype_asked_for_is_the_one_written(tmp_path, store):
    write_hf_checkpoint(TierCheckpoint(store, "t0", "bfloat16"), tmp_path / "out")
    found = HfCheckpoint(tmp_path / "out")
    assert found.dtype == "bfloat16"
    name = "layers.0.mlp.up_proj.weight"
    assert torch.equal(found.load(name), store.get(name).bfloat16())


def test_weight_beyond_float16_is_named(tmp_path):
    family = folder_family((1, 2))
    folder = write_tiny_family(tmp_path / "family", family)
    store = WeightStore(folder)
    huge = torch.full((3,), 1e6)
    store.get = lambda name: huge
    with pytest.raises(CheckpointError, match=r"norm\.weight: .*float16, got up to 1e\+06"):
        TierCheckpoint(store, "t0", "float16").load("norm.weight")


def test_unknown_tier_and_dtype_are_refused_by_name(store):
    with pytest.raises(FamilyError, match="expected one of t0, t1, t2, got 'huge'"):
        TierCheckpoint(store, "huge")
    with pytest.raises(ConfigError, match="int8"):
        TierCheckpoint(store, "t0", "int8")


def test_export_is_replaced_only_by_force_and_a_family_never(tmp_path, store):
    write_hf_checkpoint(TierCheckpoint(store, "t0"), tmp_path / "out")
    with pytest.raises(ConfigError, match="--force"):
        write_hf_checkpoint(TierCheckpoint(store, "t1"), tmp_path / "out")
    write_hf_checkpoint(TierCheckpoint(store, "t1"), tmp_path / "out", force=True)
    assert HfCheckpoint(tmp_path / "out").config.num_layers == 2
    (store.folder / "config.json").write_text("{}")  # as one with a tokenizer has
    with pytest.raises(ConfigError, match="never overwritten"):
        write_hf_checkpoint(TierCheckpoint(store, "t0"), store.folder, force=True)


def test_failure_midway_leaves_nothing(tmp_path, store):
    reader = TierCheckpoint(store, "t0")

    def fail(name):
        raise OSError("disk")

    reader.load = fail
    with pytest.raises(OSError, match="disk"):
        write_hf_checkpoint(reader, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["family"]
