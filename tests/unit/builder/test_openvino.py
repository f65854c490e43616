"""An openvino build writes one plan a segment and one a distinct head, once, or nothing."""

import sys
from dataclasses import replace
from pathlib import Path

import openvino as ov
import pytest

from mfs_trt.builder.build import build_engine
from mfs_trt.builder.cache import resolve_engine
from mfs_trt.builder.config import BuildConfig
from mfs_trt.builder.openvino import group_size
from mfs_trt.engine import load_engine
from mfs_trt.engine.interface import EngineLimits
from mfs_trt.engine.manifest import EngineManifest
from mfs_trt.engine.openvino_attention import BLOCK_SIZE, reading_core
from mfs_trt.errors import ConfigError, EngineError, FamilyError
from mfs_trt.weights.store import WeightStore
from tiny import tiny_config
from tiny_folders import LIMITS, build_tiny_engine, folder_family, write_tiny_family

CONFIG = BuildConfig(target="openvino", memory_nbytes=1 << 20, limits=LIMITS)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def family(tmp_path_factory) -> Path:
    """Tiers of 1, 2 and 4 layers, the lowest with a head of its own."""
    folder = tmp_path_factory.mktemp("family") / "f"
    return write_tiny_family(folder, folder_family((1, 2, 4), (0,)))


def state(folder: Path) -> dict[str, tuple[int, int]]:
    """Inode and time of every file: what a rewrite changes."""
    paths = (folder, *folder.rglob("*"))
    return {str(p): (p.stat().st_ino, p.stat().st_mtime_ns) for p in paths}


def operations(folder: Path, plan: str) -> list[ov.Node]:
    model = reading_core().read_model(folder / f"{plan}.xml")
    return model.get_ordered_ops()


def matrix_types(folder: Path, plan: str) -> set[str]:
    """Element types of the weight matrices and tables that a plan holds."""
    return {
        node.get_element_type().get_type_name()
        for node in operations(folder, plan)
        if node.get_type_name() == "Constant"
        and sum(size > 1 for size in node.get_output_shape(0)) > 1
        and not node.get_friendly_name().endswith(("scale", "zero_point"))
    }


# -- plans ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("exits", "own_heads", "is_tied", "plans"),
    [
        ((3,), (), False, ["segment_0", "head_0"]),
        ((1, 2, 4), (), True, ["segment_0", "segment_1", "segment_2", "head_0"]),
        ((1, 2, 4), (0,), False, ["segment_0", "segment_1", "segment_2", "head_0", "head_1"]),
        ((1, 2), (0, 1), True, ["segment_0", "segment_1", "head_0", "head_1"]),
    ],
)
def test_one_plan_is_built_for_each_segment_and_each_distinct_head(
    tmp_path, exits, own_heads, is_tied, plans
):
    spec = folder_family(exits, own_heads, tie_word_embeddings=is_tied)
    family = write_tiny_family(tmp_path / "family", spec)
    heard: list[str] = []
    out = build_engine(family, tmp_path / "engine", CONFIG, heard.append)
    assert heard == plans
    assert [p.name for p in EngineManifest.load(out).plans] == plans
    files = {f"{plan}.{suffix}" for plan in plans for suffix in ("xml", "bin")}
    assert {p.name for p in out.iterdir()} == files | {"engine.json"}


def test_manifest_names_what_the_plans_were_built_with(family, tmp_path):
    config = replace(CONFIG, dtype="bfloat16", kv_dtype="uint8", weight_format="int8")
    manifest = EngineManifest.load(build_engine(family, tmp_path / "engine", config))
    assert manifest.backend_version == ov.__version__
    assert (manifest.dtype, manifest.kv_dtype, manifest.weight_format) == (
        "bfloat16",
        "uint8",
        "int8",
    )
    assert manifest.block_size == BLOCK_SIZE == 32
    assert manifest.family_revision == WeightStore(family).spec.revision


def test_segment_attends_once_a_layer(family, tmp_path):
    out = build_engine(family, tmp_path / "engine", CONFIG)
    counts = [
        sum(n.get_type_name() == "PagedAttentionCall" for n in operations(out, f"segment_{s}"))
        for s in range(3)
    ]
    assert counts == [1, 1, 2]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {"f32"}),
        ({"dtype": "bfloat16"}, {"bf16", "f32"}),
        ({"weight_format": "int8"}, {"u8", "f32"}),
        ({"weight_format": "int4"}, {"i4", "u8", "f32"}),
    ],
)
def test_matrices_are_stored_as_asked_and_rotary_tables_in_fp32(
    family, tmp_path, settings, expected
):
    out = build_tiny_engine(family, tmp_path / "engine", "openvino", **settings)
    assert matrix_types(out, "segment_2") == expected


# -- the cache -----------------------------------------------------------------------------------


def test_second_resolve_is_a_hit_that_rewrites_no_file(family):
    first = resolve_engine(family, CONFIG)
    before = state(first)
    assert len(before) == 1 + 1 + 2 * 5  # the folder, engine.json, files of five plans
    assert resolve_engine(family, CONFIG) == first
    assert state(first) == before


def test_another_openvino_version_makes_another_engine(family, monkeypatch):
    first = resolve_engine(family, CONFIG)
    monkeypatch.setattr(ov, "__version__", "2031.1.0")
    second = resolve_engine(family, CONFIG)
    assert second != first
    assert EngineManifest.load(second).backend_version == "2031.1.0"


@pytest.mark.parametrize(
    "change", [{"kv_dtype": "uint8"}, {"dtype": "bfloat16"}, {"weight_format": "int8"}]
)
def test_another_precision_makes_another_engine(family, change):
    assert resolve_engine(family, CONFIG) != resolve_engine(family, replace(CONFIG, **change))


# -- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block_size": 16}, "block_size: expected 32 for target openvino, got 16"),
        (
            {"dtype": "float64"},
            "dtype: expected float32, bfloat16 for .*, got 'float64'; .* can",
        ),
        (
            {"dtype": "float16"},
            "dtype: expected float32, bfloat16 for .*, got 'float16'; .* can",
        ),
        (
            {"kv_dtype": "int3"},
            "kv_dtype: expected float32, .*uint8 for .*, got 'int3'",
        ),
        ({"kv_dtype": "bfloat16"}, "kv_dtype: expected float32, .* or uint8 .*, got 'bfloat16'"),
        (
            {"dtype": "bfloat16", "kv_dtype": "float32"},
            "kv_dtype: expected bfloat16, .* or uint8 .*, got 'float32'",
        ),
        ({"weight_format": "int2"}, "weight_format: expected int8, int4 for .*, got 'int2'"),
    ],
)
def test_setting_that_openvino_does_not_run_is_refused_by_name(settings, message):
    with pytest.raises(ConfigError, match=f"^{message}$"):
        replace(CONFIG, **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_dtype": "uint8"}, "kv_dtype: expected .* for target reference, got 'uint8'"),
        ({"weight_format": "int8"}, "weight_format: expected .* for target reference, got 'int8'"),
    ],
)
def test_setting_of_openvino_is_refused_for_the_reference(settings, message):
    with pytest.raises(ConfigError, match=message):
        BuildConfig(target="reference", **settings)


@pytest.mark.parametrize(
    ("settings", "nbytes"), [({}, 4), ({"dtype": "bfloat16"}, 2), ({"kv_dtype": "uint8"}, 1)]
)
def test_memory_too_small_is_refused_before_anything_is_built(family, tmp_path, settings, nbytes):
    # Five frames (1, 1 and 2 layer groups, the null frame): K and V, 2 heads, 32 tokens of 16.
    needed = 5 * 2 * 2 * 32 * 16 * nbytes
    config = replace(CONFIG, memory_nbytes=needed - 1, **settings)
    heard: list[str] = []
    with pytest.raises(EngineError, match=f"at least {needed} bytes .*, got {needed - 1}"):
        build_engine(family, tmp_path / "engine", config, heard.append)
    assert not heard and not list(tmp_path.glob("*engine*"))


def test_memory_that_is_too_small_with_the_scales_is_refused_at_load(family, tmp_path):
    config = replace(CONFIG, memory_nbytes=5 * 2 * 2 * 32 * 16, kv_dtype="uint8")
    out = build_engine(family, tmp_path / "engine", config)
    with pytest.raises(EngineError, match=f"memory: expected .*, got {config.memory_nbytes}$"):
        load_engine(out)


@pytest.mark.parametrize(
    ("hidden_size", "intermediate_size", "size"),
    [(576, 1536, 64), (4096, 14336, 128), (40, 48, 8), (1536, 8960, 128)],
)
def test_weights_of_four_bits_share_a_scale_in_groups_that_divide_every_row(
    hidden_size, intermediate_size, size
):
    model = tiny_config(
        hidden_size=hidden_size, intermediate_size=intermediate_size, num_heads=16, head_dim=64
    )
    assert group_size(model) == size


def test_compression_without_nncf_is_refused_by_the_package_that_is_missing(
    family, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "nncf", None)
    with pytest.raises(ConfigError, match="weight_format: int8 needs the package nncf"):
        build_engine(family, tmp_path / "engine", replace(CONFIG, weight_format="int8"))
    assert not list(tmp_path.glob("*engine*"))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_refused_by_name(tmp_path, value, monkeypatch):
    spec = folder_family((1, 2))
    name = "layers.1.mlp.up_proj.weight"
    family = write_tiny_family(tmp_path / "family", spec)
    get = WeightStore.get

    def broken(store, wanted):
        tensor = get(store, wanted).clone()
        if wanted == name:
            tensor[3, 4] = value
        return tensor

    monkeypatch.setattr(WeightStore, "get", broken)
    with pytest.raises(FamilyError, match=f"{name}: expected finite weights"):
        build_engine(family, tmp_path / "engine", CONFIG)
    assert not list(tmp_path.glob("*engine*"))


@pytest.mark.parametrize("plan", ["segment_0", "segment_2", "head_1"])
@pytest.mark.parametrize("is_rebuild", [False, True])
def test_build_that_fails_at_a_plan_leaves_no_trace(family, tmp_path, plan, is_rebuild):
    out = tmp_path / "engines" / "engine"
    if is_rebuild:
        build_engine(family, out, CONFIG)
    before = state(out.parent) if is_rebuild else {}

    def fail(name: str) -> None:
        if name == plan:
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        build_engine(family, out, replace(CONFIG, dtype="bfloat16"), fail)
    after = state(out.parent)
    del after[str(out.parent)]
    before.pop(str(out.parent), None)
    assert after == before


def test_build_changes_no_file_of_the_family(family, tmp_path):
    before = state(family)
    build_engine(family, tmp_path / "engine", CONFIG)
    assert state(family) == before


def test_limits_are_kept(family, tmp_path):
    limits = EngineLimits(3, 5, 7)
    out = build_engine(family, tmp_path / "engine", replace(CONFIG, limits=limits))
    assert load_engine(out).limits == limits
