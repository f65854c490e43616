"""Engines built on demand: once for the same family and settings, again when either changes."""

import json

import pytest

import mfs_trt
from mfs_trt.builder.build import build_engine
from mfs_trt.builder.cache import cache_folder, resolve_engine
from mfs_trt.builder.config import BuildConfig
from mfs_trt.engine.manifest import EngineManifest
from mfs_trt.errors import EngineError

CONFIG = BuildConfig(target="reference", memory_nbytes=1 << 20)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def family(family_folder):
    return family_folder()


def test_engine_folder_is_taken_as_it_is(family, tmp_path):
    engine = build_engine(family, tmp_path / "engine", CONFIG)
    assert resolve_engine(engine) == engine
    assert not cache_folder().exists()


def test_family_is_built_into_the_cache(family, tmp_path):
    engine = resolve_engine(family, CONFIG)
    assert engine.parent == tmp_path / "cache" / "mfs-trt" / "engines" == cache_folder()
    assert EngineManifest.load(engine).memory_nbytes == 1 << 20


def test_second_resolve_is_a_hit_that_rewrites_nothing(family):
    first = resolve_engine(family, CONFIG)
    before = (first / "engine.json").stat(), first.stat()
    assert resolve_engine(family, CONFIG) == first
    after = (first / "engine.json").stat(), first.stat()
    assert [(s.st_ino, s.st_mtime_ns) for s in before] == [(s.st_ino, s.st_mtime_ns) for s in after]
    assert list(cache_folder().iterdir()) == [first]


def test_relative_path_finds_the_same_engine(family, monkeypatch):
    first = resolve_engine(family, CONFIG)
    monkeypatch.chdir(family.parent)
    assert resolve_engine(family.name, CONFIG) == first


@pytest.mark.parametrize("change", ["settings", "revision", "version"])
def test_what_the_engine_depends_on_makes_another(family, change, monkeypatch):
    first = resolve_engine(family, CONFIG)
    config = CONFIG
    if change == "settings":
        config = BuildConfig(target="reference", memory_nbytes=1 << 20, block_size=16)
    elif change == "revision":
        path = family / "family.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "revision": "new"}))
    else:
        monkeypatch.setattr(mfs_trt, "__version__", "99")
    second = resolve_engine(family, config)
    assert second != first
    assert first.exists()


def test_folder_that_is_neither_engine_nor_family_is_refused(tmp_path):
    with pytest.raises(EngineError, match="expected an engine folder .* or a family folder"):
        resolve_engine(tmp_path)


def test_cache_lies_under_the_home_folder_without_xdg(monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "mfs-trt" / "engines"


def test_a_kept_engine_with_a_damaged_plan_is_built_again(family):
    engine = resolve_engine(family, BuildConfig(target="openvino"))
    plan = engine / "segment_0.bin"
    whole = plan.read_bytes()
    plan.write_bytes(whole[:-1])
    assert resolve_engine(family, BuildConfig(target="openvino")) == engine
    assert plan.read_bytes() == whole
