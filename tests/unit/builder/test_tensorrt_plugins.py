"""A tensorrt build takes plugins where networks do, calls them rightly, or says what is missing.

Full TensorRT is stood in for: `tensorrt.plugin` is the real package, networks are TensorRT-RTX's.
"""

import sys
from types import SimpleNamespace

import pytest
import tensorrt_rtx_bindings as trt
import torch
from typer.testing import CliRunner

from mfs_trt.builder.build import build_engine
from mfs_trt.builder.cache import resolve_engine
from mfs_trt.builder.config import BuildConfig
from mfs_trt.builder.emitters.tensorrt_plugins import Launch, choose_launch
from mfs_trt.builder.tensorrt_ways import choose_way
from mfs_trt.cli.app import app
from mfs_trt.engine.interface import EngineLimits
from mfs_trt.engine.manifest import EngineManifest
from mfs_trt.engine.tensorrt_api import TensorRtApi
from mfs_trt.errors import ConfigError
from plugin_networks import VERSION, full_tensorrt
from tensorrt_rig import describe_networks, full_config
from tiny_folders import folder_family, write_tiny_family

FAMILY = folder_family((1, 3), (0,), "mistral", sliding_window=9, windowed_layers=(1,))
LAUNCH = Launch(compute_capability=86, tile_rows=16, num_splits=1)


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    """Tiers of 1 and 3 layers, the second one in a window, the lowest with a head of its own."""
    return write_tiny_family(tmp_path_factory.mktemp("family") / "f", FAMILY)


@pytest.fixture(scope="module")
def networks(family):
    """Definitions by name, in float16. The emitters keep the weights."""
    described = describe_networks(family, full_config(dtype="float16"), LAUNCH)
    yield {n.name: n.emitter.network for n in described}
    del described


# -- layers --------------------------------------------------------------------------------------


def types_and_shapes(tensors):
    return [(t.dtype, tuple(t.shape)) for t in tensors]


def test_a_layer_writes_its_keys_and_values_and_then_attends(networks):
    assert [p.name for p in networks["segment_1"].plugins] == ["kv_write", "paged_attention"] * 2


def test_write_has_keys_values_slots_and_the_arena(networks):
    arena = tuple(networks["segment_1"].get_output(0).shape)
    assert arena[1:] == (2, 32, 16)
    rows = (trt.float16, (-1, 2, 16))
    for group, plugin in enumerate(networks["segment_1"].plugins[::2]):
        assert plugin.input_names()[2:] == [
            "slot_mapping",
            f"key_cache.{group}.0",
            f"value_cache.{group}.0",
        ]
        assert types_and_shapes(plugin.inputs) == [
            *(rows, rows),
            (trt.int32, (-1, 2)),
            *((trt.float16, arena),) * 2,
        ]
        assert plugin.attributes == {"group": group, "compute_capability": 86}
        assert plugin.aliases == [3, 4]


def test_attention_reads_the_caches_that_its_layer_has_written(networks):
    plugins = networks["segment_1"].plugins
    for group, (write, attention) in enumerate(zip(plugins[::2], plugins[1::2], strict=True)):
        names = [f"new_{kind}.{group}.0" for kind in ("key_cache", "value_cache")]
        assert attention.input_names()[1:3] == [t.name for t in write.outputs] == names
        assert attention.input_names()[3:] == ["block_tables", "query_start_loc", "seq_lens"]
        assert types_and_shapes(attention.inputs[:1] + attention.inputs[3:]) == [
            (trt.float16, (-1, 4, 16)),
            (trt.int32, (-1, -1, 2)),
            *((trt.int32, (-1,)),) * 2,
        ]
        assert attention.attributes == {
            "group": group,
            "window": 9 if group == 0 else 0,
            "scale": 0.25,
            "tile_rows": 16,
            "compute_capability": 86,
        }


def test_nothing_but_its_write_reads_a_cache_of_the_arena(networks):
    """A second reader would be a reason for TensorRT to copy the arena before the write."""
    network = networks["segment_1"]
    read = [name for plugin in network.plugins for name in plugin.input_names()]
    for i in range(network.num_layers):
        layer = network.get_layer(i)
        read += [layer.get_input(j).name for j in range(layer.num_inputs) if layer.get_input(j)]
    for name in (f"{kind}.{g}.0" for kind in ("key_cache", "value_cache") for g in range(2)):
        assert read.count(name) == 1


def test_split_attention_is_merged_in_the_plans_own_type(family):
    launch = Launch(compute_capability=86, tile_rows=16, num_splits=3)
    (network, *_) = describe_networks(family, full_config(dtype="float16"), launch)
    _, split, merge = network.emitter.network.plugins
    assert (split.name, merge.name) == ("paged_attention_split", "merge_splits")
    assert types_and_shapes(split.outputs) == [
        (trt.float32, (3, -1, 4, 16)),
        (trt.float32, (3, -1, 4)),
    ]
    assert merge.input_names() == [t.name for t in split.outputs]
    assert merge.attributes == {"dtype": "float16", "num_splits": 3, "compute_capability": 86}
    assert types_and_shapes(merge.outputs) == [(trt.float16, (-1, 4, 16))]


def test_head_gathers_and_normalises_in_one_plugin(networks):
    (plugin,) = networks["head_1"].plugins
    assert plugin.name == "tier_exit"
    assert plugin.input_names() == ["rows", "exit_rows", "tiers", "gains"]
    assert types_and_shapes(plugin.inputs) == [
        (trt.float16, (-1, 40)),
        *((trt.int32, (-1,)),) * 2,
        (trt.float16, (2, 40)),
    ]
    eps = FAMILY.model.rms_norm_eps
    assert plugin.attributes == {"eps": eps, "compute_capability": 86}


def test_segment_has_the_inputs_and_outputs_that_the_engine_binds(networks):
    network = networks["segment_0"]
    inputs = {network.get_input(i).name for i in range(network.num_inputs)}
    outputs = [network.get_output(i).name for i in range(network.num_outputs)]
    assert inputs == {
        *("input_ids", "embed_tokens.weight", "positions"),
        *("slot_mapping", "block_tables", "query_start_loc", "seq_lens"),
        *("key_cache.0.0", "value_cache.0.0"),
    }
    assert outputs == ["new_key_cache.0.0", "new_value_cache.0.0", "hidden"]


def test_arena_has_no_scratch_frames(networks, family):
    portable = describe_networks(family, full_config(dtype="float16", attention="portable"))
    theirs, ours = (
        next(t for t in map(n.get_input, range(n.num_inputs)) if t.name == "key_cache.0.0").shape[0]
        for n in (portable[0].emitter.network, networks["segment_0"])
    )
    assert ours == theirs - 512 // 32


@pytest.mark.parametrize(
    ("num_seqs", "max_model_len", "expected"),
    [(64, 4096, 1), (2, 256, 1), (2, 4096, 8), (1, 32768, 32)],
)
def test_keys_are_split_where_few_requests_have_long_contexts(num_seqs, max_model_len, expected):
    limits = EngineLimits(num_seqs, 512, max_model_len)
    launch = choose_launch(limits, num_kv_heads=8, compute_capability=90, num_processors=132)
    assert launch == Launch(90, 16, expected)


# -- the way that is taken -----------------------------------------------------------------------


@pytest.fixture
def processors(monkeypatch):
    """A GPU as large as an H100."""
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: properties)


@pytest.mark.parametrize(
    ("asked", "taken"), [("", "plugin"), ("plugin", "plugin"), ("portable", "portable")]
)
def test_networks_that_take_plugins_get_them_unless_forbidden(processors, asked, taken):
    with full_tensorrt() as api:
        assert choose_way(api, FAMILY, full_config(attention=asked), ("sm90",)).name == taken


def api_without_plugins() -> TensorRtApi:
    network = type("INetworkDefinition", (), {})
    module = SimpleNamespace(__name__="tensorrt", __version__="10.9", INetworkDefinition=network)
    return TensorRtApi("tensorrt", module)


def test_networks_that_take_none_are_portable():
    assert choose_way(api_without_plugins(), FAMILY, full_config(), ("sm90",)).name == "portable"


def test_plugins_for_networks_that_take_none_are_refused_with_module_and_remedy():
    with pytest.raises(ConfigError) as caught:
        choose_way(api_without_plugins(), FAMILY, full_config(attention="plugin"), ("sm90",))
    assert str(caught.value) == (
        "attention: target tensorrt: networks of tensorrt 10.9 take no plugins; expected "
        "portable, or target tensorrt with tensorrt>=10.13"
    )


def test_plugins_without_openai_triton_say_what_to_install(monkeypatch):
    with full_tensorrt() as api, monkeypatch.context() as patch:
        patch.setitem(sys.modules, "triton", None)
        with pytest.raises(ConfigError, match="pip install 'triton'.* portable needs neither"):
            choose_way(api, FAMILY, full_config(), ("sm90",))


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (
            "tensorrt-rtx",
            "portable for target tensorrt-rtx, got 'plugin' "
            "(networks of tensorrt_rtx_bindings take no plugins); tensorrt can",
        ),
        ("openvino", "none for target openvino, got 'plugin'; tensorrt can"),
        ("cuda", "none for target cuda, got 'plugin'; tensorrt can"),
    ],
)
def test_target_without_plugins_is_refused_with_the_one_that_has_them(target, expected):
    with pytest.raises(ConfigError) as caught:
        BuildConfig(target=target, attention="plugin")
    assert str(caught.value) == f"attention: expected {expected}"


# -- builds --------------------------------------------------------------------------------------


@pytest.fixture
def gpu(processors, monkeypatch):
    """A machine with an H100 and full TensorRT, as far as a build can tell."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    with full_tensorrt():
        yield


@pytest.mark.parametrize(("asked", "taken"), [("", "plugin"), ("portable", "portable")])
def test_manifest_names_the_way_that_the_plans_attend(family, tmp_path, gpu, asked, taken):
    command = ["build", str(family), "--out", str(tmp_path / "e"), "--target", "tensorrt"]
    command += ["--memory", "8MiB", *(["--attention", asked] if asked else [])]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    manifest = EngineManifest.load(tmp_path / "e")
    assert (manifest.attention, manifest.backend_version) == (taken, VERSION)
    assert manifest.compute_capabilities == ("sm90",)


def test_plugins_are_built_with_what_in_place_writes_need(family, tmp_path, gpu):
    folder = build_engine(family, tmp_path / "e", full_config(dtype="float16"))
    plugins, features, profiles = eval((folder / "segment_0.plan").read_text())
    assert plugins == ["kv_write", "paged_attention"]
    assert features == {"ALIASED_PLUGIN_IO_10_03": True}
    for profile in profiles:
        assert profile["slot_mapping"][0] == (1, 1)
        assert profile["query_start_loc"][0] == (2,)
    assert len(profiles) == 2


def test_another_way_makes_another_engine(family, tmp_path, monkeypatch, gpu):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    built = []
    monkeypatch.setattr(
        "mfs_trt.builder.cache.build_engine", lambda source, out, config: built.append(out)
    )
    for attention in ("", "portable", "plugin"):
        resolve_engine(family, full_config(attention=attention))
    assert len(set(built)) == 3
