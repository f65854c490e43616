"""A tensorrt-rtx build writes real plans for GPUs that are not here, once, or says why not."""

import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
import tensorrt_rtx_bindings as trt
import torch

from mfs_trt.builder.build import build_engine
from mfs_trt.builder.cache import resolve_engine
from mfs_trt.builder.config import BuildConfig
from mfs_trt.builder.tensorrt import built_for
from mfs_trt.engine.interface import EngineLimits
from mfs_trt.engine.manifest import EngineManifest
from mfs_trt.engine.tensorrt_api import load_api
from mfs_trt.engine.tensorrt_inputs import num_scratch_frames
from mfs_trt.errors import ConfigError, EngineError, FamilyError
from mfs_trt.weights.store import WeightStore
from tensorrt_rig import describe_networks, rtx_config
from tiny_folders import LIMITS, folder_family, write_tiny_family

FAMILY = folder_family((1, 3), (0,))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def family(tmp_path_factory) -> Path:
    """Tiers of 1 and 3 layers, the lowest with a head of its own."""
    return write_tiny_family(tmp_path_factory.mktemp("family") / "f", FAMILY)


@pytest.fixture(scope="module")
def built(family, tmp_path_factory) -> tuple[Path, list[str]]:
    """Engine folder, and the plans that the build has told of."""
    config = rtx_config(dtype="float16", compute_capabilities=("sm86", "sm120"))
    names = []
    folder = build_engine(family, tmp_path_factory.mktemp("engine") / "e", config, names.append)
    return folder, names


@pytest.fixture
def engine(built) -> Path:
    return built[0]


# -- plans ---------------------------------------------------------------------------------------

ATTENTION_INPUTS = {
    "lane_rows": (trt.int32, (-1, -1)),
    "lane_positions": (trt.int32, (-1, -1)),
    "lane_lengths": (trt.int32, (-1,)),
    "row_queries": (trt.int32, (-1,)),
    "key_positions": (trt.int32, (-1,)),
}


def io_of(segment: int, dtype, num_frames: int):
    """Inputs and outputs of a segment of FAMILY, of 1 and 2 layers: two layer groups."""
    cache = (num_frames, 2, 32, 16)
    inputs = {"positions": (trt.int32, (-1,)), **ATTENTION_INPUTS}
    outputs = {"hidden": (dtype, (-1, 40))}
    if segment == 0:
        inputs |= {"input_ids": (trt.int32, (-1,)), "embed_tokens.weight": (dtype, (61, 40))}
    else:
        inputs |= dict.fromkeys(("below", "features"), (dtype, (-1, 40)))
        inputs["source_rows"] = (trt.int32, (-1,))
    for group in range(segment + 1):
        inputs |= {
            f"block_tables.{group}": (trt.int32, (-1, -1)),
            f"rows_by_frame.{group}": (trt.int32, (-1,)),
            f"frame_row_starts.{group}": (trt.int32, (num_frames + 1,)),
            f"frame_offsets.{group}": (trt.int32, (num_frames,)),
        }
        for kind in ("key_cache", "value_cache"):
            inputs[f"{kind}.{group}.0"] = (dtype, cache)
            outputs[f"new_{kind}.{group}.0"] = (dtype, cache)
    return inputs, outputs


def head_io(dtype):
    inputs = {"rows": (dtype, (-1, 40)), "gains": (dtype, (2, 40))}
    inputs |= dict.fromkeys(("exit_rows", "tiers"), (trt.int32, (-1,)))
    return inputs, {"logits": (dtype, (-1, 61))}


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [("float16", trt.float16), ("bfloat16", trt.bfloat16), ("float32", trt.float32)],
)
def test_networks_have_the_inputs_and_outputs_that_the_engine_binds(family, dtype, kind):
    config = rtx_config(dtype=dtype)
    manifest = EngineManifest("tensorrt-rtx", "", "", dtype, 32, 8 << 20, LIMITS)
    itemsize = 4 if dtype == "float32" else 2
    spec = manifest.kv_spec(FAMILY, manifest.layer_nbytes(FAMILY, itemsize))
    num_frames = spec.num_frames + num_scratch_frames(LIMITS, 32)
    expected = [
        io_of(0, kind, num_frames),
        io_of(1, kind, num_frames),
        head_io(kind),
        head_io(kind),
    ]
    for network, (inputs, outputs) in zip(describe_networks(family, config), expected, strict=True):
        definition = network.emitter.network
        given = [definition.get_input(i) for i in range(definition.num_inputs)]
        made = [definition.get_output(i) for i in range(definition.num_outputs)]
        assert {t.name: (t.dtype, tuple(t.shape)) for t in given} == inputs
        assert {t.name: (t.dtype, tuple(t.shape)) for t in made} == outputs


def test_built_plans_hold_their_inputs_and_outputs_by_name(engine):
    for segment in range(2):
        content = (engine / f"segment_{segment}.plan").read_bytes()
        for name in (name for side in io_of(segment, None, 1) for name in side):
            assert name.encode() in content
    assert b"gains" in (engine / "head_1.plan").read_bytes()


def test_manifest_names_plans_version_and_gpus(engine):
    manifest = EngineManifest.load(engine)
    assert [plan.name for plan in manifest.plans] == ["segment_0", "segment_1", "head_0", "head_1"]
    assert manifest.backend_version == trt.__version__
    assert manifest.compute_capabilities == ("sm86", "sm120")
    assert manifest.tensor_parallel_size == 1
    for plan in manifest.plans:
        plan.check(engine)


def test_plan_holds_the_weights_of_its_own_layers_only(tmp_path):
    """Sizes of the same family with MLPs of two widths: the difference is those weights."""
    hidden, widths, vocab = 128, (64, 8192), 6000
    sizes = []
    for width in widths:
        spec = folder_family((1, 3), hidden_size=hidden, intermediate_size=width, vocab_size=vocab)
        folder = write_tiny_family(tmp_path / f"family-{width}", spec, "float16")
        config = rtx_config(dtype="float16", compute_capabilities=("sm86",))
        out = build_engine(folder, tmp_path / f"engine-{width}", config)
        sizes.append({p.stem: p.stat().st_size for p in out.glob("*.plan")})
    layer_nbytes = 3 * 2 * hidden * (widths[1] - widths[0])
    grown = {name: sizes[1][name] - sizes[0][name] for name in sizes[0]}
    assert abs(grown["segment_0"] - layer_nbytes) < 0.1 * layer_nbytes
    assert abs(grown["segment_1"] - 2 * layer_nbytes) < 0.1 * layer_nbytes
    assert abs(grown["head_0"]) < 0.1 * layer_nbytes
    assert sizes[0]["head_0"] > 2 * hidden * vocab, "the head's weights are in its plan"


def test_build_reports_each_plan(built):
    assert built[1] == ["segment_0", "segment_1", "head_0", "head_1"]


def test_build_tells_of_the_librarys_phases_up_to_the_whole_of_each(family, tmp_path):
    heard: dict[str, list[float]] = defaultdict(list)
    build_engine(
        family,
        tmp_path / "engine",
        rtx_config(dtype="float16", compute_capabilities=("sm86",)),
        on_phase=lambda phase, share: heard[phase].append(share),
    )
    plans = {phase.split(": ")[0] for phase in heard}
    assert plans == {"segment_0", "segment_1", "head_0", "head_1"}
    for shares in heard.values():
        assert shares[0] == 0 and shares[-1] == 1 and 0 <= min(shares) <= max(shares) <= 1


def test_second_resolve_is_a_hit_that_rewrites_nothing(tmp_path):
    family = write_tiny_family(tmp_path / "f", folder_family((1,)))
    config = rtx_config(dtype="float16")
    first = resolve_engine(family, config)
    before = {p: (p.stat().st_ino, p.stat().st_mtime_ns) for p in (first, *first.iterdir())}
    assert resolve_engine(family, config) == first
    after = {p: (p.stat().st_ino, p.stat().st_mtime_ns) for p in (first, *first.iterdir())}
    assert before == after and len(before) == 4


def test_other_gpus_make_another_engine(family, monkeypatch):
    built = []
    monkeypatch.setattr(
        "mfs_trt.builder.cache.build_engine", lambda source, out, config: built.append(out)
    )
    for gpus in ((), ("sm86",), ("sm89",)):
        resolve_engine(family, rtx_config(compute_capabilities=gpus))
    assert len(set(built)) == 3


# -- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["tensorrt", "tensorrt-rtx"])
@pytest.mark.parametrize(
    ("name", "value", "expected", "other"),
    [
        ("dtype", "float64", "float16, bfloat16, float32", "reference"),
        ("kv_dtype", "uint8", "none", "openvino"),
    ],
)
def test_setting_that_a_target_does_not_take_is_refused_with_one_that_does(
    target, name, value, expected, other
):
    with pytest.raises(ConfigError) as caught:
        BuildConfig(target=target, **{name: value})
    message = f"{name}: expected {expected} for target {target}, got {value!r}; {other} can"
    assert str(caught.value) == message


def test_gpus_that_are_not_here_need_the_rtx_target():
    message = "expected none for target tensorrt, got sm86; target tensorrt-rtx builds for"
    with pytest.raises(ConfigError, match=message):
        BuildConfig(target="tensorrt", compute_capabilities=("sm86",))


def test_text_that_is_no_compute_capability_is_refused():
    with pytest.raises(ConfigError, match="expected names as sm86, got '8.6'"):
        rtx_config(compute_capabilities=("8.6",))


def test_gpu_that_the_module_does_not_know_is_refused_with_those_it_does(family, tmp_path):
    with pytest.raises(ConfigError, match="builds for sm75, sm80, .*, sm121, got sm90"):
        build_engine(family, tmp_path / "e", rtx_config(compute_capabilities=("sm90",)))
    assert not (tmp_path / "e").exists()


def test_what_the_library_cannot_build_is_refused_with_its_reason(family, tmp_path):
    config = rtx_config(dtype="bfloat16", compute_capabilities=("sm75",))
    message = r"tensorrt-rtx: 1\.7\.1\.116 cannot build segment_0 \(bfloat16\): .*sm75"
    with pytest.raises(ConfigError, match=message) as caught:
        build_engine(family, tmp_path / "e", config)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "e").exists()


@pytest.mark.parametrize("target", ["tensorrt", "tensorrt-rtx"])
def test_build_without_the_module_says_what_to_install(family, tmp_path, monkeypatch, target):
    for name in ("tensorrt", "tensorrt_rtx", "tensorrt_rtx_bindings"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=f"target {target}: cannot import .*pip install"):
        build_engine(family, tmp_path / "e", BuildConfig(target=target))
    assert not (tmp_path / "e").exists()


def test_full_tensorrt_without_a_gpu_names_the_target_that_needs_none(monkeypatch):
    api = replace(load_api("tensorrt-rtx"), module=trt.tensorrt_rtx.Dims, target="tensorrt")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = BuildConfig(target="tensorrt", dtype="float16")
    with pytest.raises(ConfigError, match="found none; target tensorrt-rtx builds without one"):
        built_for(api, config)


def test_weights_that_float16_cannot_hold_are_refused_by_name(tmp_path, monkeypatch):
    folder = write_tiny_family(tmp_path / "f", FAMILY)
    original = WeightStore.get

    def large(store, name):
        tensor = original(store, name)
        return tensor * 1e6 if name == "layers.0.mlp.up_proj.weight" else tensor

    monkeypatch.setattr(WeightStore, "get", large)
    message = "layers.0.mlp.up_proj.weight: expected weights that are finite in float16"
    with pytest.raises(FamilyError, match=message):
        build_engine(folder, tmp_path / "e", rtx_config(dtype="float16"))


def test_more_than_one_gpu_a_layer_is_refused(engine):
    with pytest.raises(EngineError, match="tensor_parallel_size: expected 1, .* got 2"):
        replace(EngineManifest.load(engine), tensor_parallel_size=2)


def test_memory_below_one_block_of_each_segment_is_refused(family, tmp_path):
    config = rtx_config(memory_nbytes=4096, limits=EngineLimits(2, 16, 64))
    with pytest.raises(EngineError, match="memory: expected at least"):
        build_engine(family, tmp_path / "e", config)
