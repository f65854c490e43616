"""A build writes an engine folder that loads, or names what is wrong and writes nothing."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mfs_trt.builder.build import build_engine
from mfs_trt.builder.config import BuildConfig, parse_nbytes
from mfs_trt.engine import load_engine
from mfs_trt.engine.interface import EngineLimits
from mfs_trt.engine.manifest import EngineManifest
from mfs_trt.errors import ConfigError, EngineError, FamilyError

CONFIG = BuildConfig(
    target="reference", block_size=4, memory_nbytes=1 << 20, limits=EngineLimits(2, 16, 64)
)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def family(family_folder):
    return family_folder()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_built_engine_loads_with_the_settings_it_was_built_for(family, tmp_path, dtype):
    config = BuildConfig(
        target="reference", dtype=dtype, block_size=4, memory_nbytes=1 << 20, limits=CONFIG.limits
    )
    engine = load_engine(build_engine(family, tmp_path / "out" / "engine", config))
    assert engine.limits == config.limits
    assert engine.kv_spec.block_size == 4
    spec, hidden_size = engine.kv_spec, engine.family.model.hidden_size
    itemsize = engine.features[0].element_size()
    used = spec.nbytes + 2 * spec.num_feature_slots * hidden_size * itemsize
    assert used <= 1 << 20 < used + 2 * spec.frame_nbytes
    assert engine.key_cache[0].dtype == getattr(torch, dtype)


def test_manifest_names_the_family_by_absolute_path_and_revision(family, tmp_path, monkeypatch):
    monkeypatch.chdir(family.parent)
    folder = build_engine(family.name, tmp_path / "engine", CONFIG)
    manifest = EngineManifest.load(folder)
    assert manifest.family == str(family.resolve())
    assert manifest.load_family().revision == manifest.family_revision


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target": "abacus"}, "target: expected .*reference.*, got 'abacus'"),
        ({"dtype": "int3"}, "dtype: expected float32, bfloat16, float64 .*, got 'int3'"),
        ({"block_size": 0}, "block_size: expected at least 1, got 0"),
        ({"memory_nbytes": 0}, "memory: expected at least 1, got 0"),
        ({"limits": EngineLimits(max_num_seqs=0)}, "max_num_seqs: expected at least 1"),
        ({"limits": EngineLimits(max_num_batched_tokens=-1)}, "max_num_batched_tokens: .* got -1"),
        ({"limits": EngineLimits(max_model_len=0)}, "max_model_len: expected at least 1"),
    ],
)
def test_wrong_setting_is_refused_by_name(settings, message):
    with pytest.raises(ConfigError, match=message):
        BuildConfig(**{"target": "reference", **settings})


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("7", 7), ("512MiB", 512 << 20), (" 2 GiB ", 2 << 30), ("1.5KiB", 1536), ("1B", 1)],
)
def test_memory_sizes_are_read(text, nbytes):
    assert parse_nbytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "2GB", "-1MiB", "1 e3"])
def test_text_that_is_no_memory_size_is_refused(text):
    with pytest.raises(ConfigError, match="memory: expected a size such as"):
        parse_nbytes(text)


@pytest.mark.parametrize(("dtype", "nbytes"), [("float32", 4), ("bfloat16", 2), ("float64", 8)])
def test_memory_too_small_for_the_dtype_is_refused_in_bytes(family, tmp_path, dtype, nbytes):
    # Four frames (one a segment, and the null frame): K and V, 2 layers, 2 heads, 4 tokens of 12.
    needed = 4 * 2 * 2 * 2 * 4 * 12 * nbytes
    settings = {"dtype": dtype, "block_size": 4, "limits": CONFIG.limits}
    build_engine(
        family, tmp_path / "fits", BuildConfig(target="reference", memory_nbytes=needed, **settings)
    )
    with pytest.raises(EngineError, match=f"at least {needed} bytes .*, got {needed - 1}"):
        build_engine(
            family,
            tmp_path / "no",
            BuildConfig(target="reference", memory_nbytes=needed - 1, **settings),
        )
    assert not (tmp_path / "no").exists()


def test_context_beyond_what_the_rotary_embedding_serves_is_refused(
    hf_folder, family_folder, tmp_path
):
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    family = family_folder(hf_folder(rope_parameters=rope, max_position_embeddings=32))
    with pytest.raises(ConfigError, match="max_model_len: expected at most 32 .* got 64"):
        build_engine(family, tmp_path / "engine", CONFIG)


def test_folder_that_is_no_family_is_refused(tmp_path):
    with pytest.raises(FamilyError, match="expected a family folder with family.json"):
        build_engine(tmp_path, tmp_path / "engine", CONFIG)


def test_engine_folder_is_replaced_whole(family, tmp_path):
    out = build_engine(family, tmp_path / "engine", CONFIG)
    (out / "leftover").write_text("")
    build_engine(family, out, BuildConfig(target="reference", block_size=8, memory_nbytes=1 << 20))
    assert EngineManifest.load(out).block_size == 8
    assert list(contents(out)) == ["engine.json"]


def test_empty_folder_is_filled(family, tmp_path):
    (tmp_path / "engine").mkdir()
    assert list(contents(build_engine(family, tmp_path / "engine", CONFIG))) == ["engine.json"]


def test_folder_that_holds_anything_else_is_never_overwritten(family, tmp_path):
    out = tmp_path / "thesis"
    out.mkdir()
    (out / "chapter1.txt").write_text("It was a dark and stormy night.")
    before = contents(tmp_path)
    with pytest.raises(EngineError, match="thesis: expected an empty or an engine folder"):
        build_engine(family, out, CONFIG)
    with pytest.raises(EngineError, match="expected an empty or an engine folder"):
        build_engine(family, family, CONFIG)
    with pytest.raises(EngineError, match="expected an empty or an engine folder"):
        build_engine(family, out / "chapter1.txt", CONFIG)
    assert contents(tmp_path) == before


def test_failed_build_leaves_no_trace(family, tmp_path, monkeypatch):
    out = build_engine(family, tmp_path / "engine", CONFIG)
    before = contents(tmp_path)

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(EngineManifest, "save", fail)
    with pytest.raises(OSError, match="disk full"):
        build_engine(family, out, CONFIG)
    assert contents(tmp_path) == before
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_engine_of_a_dtype_that_the_reference_does_not_compute_in_is_refused(family, tmp_path):
    manifest = EngineManifest.load(build_engine(family, tmp_path / "engine", CONFIG))
    replace(manifest, dtype="int3").save(tmp_path / "engine")
    with pytest.raises(EngineError, match="dtype: expected float32, .*, got 'int3'"):
        load_engine(tmp_path / "engine")
