"""A tensorrt-llm build calls `GPTAttention` as its library wants, or says what is missing.

The library is stood in for by a plugin that torch evaluates; it was never built with the real one.
"""

import sys

import numpy as np
import pytest
import tensorrt_rtx_bindings as trt

from llm_plugins import FIELDS, INPUTS, llm_tensorrt
from mfs_trt.builder.build import build_engine
from mfs_trt.builder.config import BuildConfig
from mfs_trt.builder.emitters.tensorrt_llm import TensorRtLlmEmitter
from mfs_trt.builder.tensorrt_ways import choose_way
from mfs_trt.engine import load_engine
from mfs_trt.errors import ConfigError
from plugin_networks import full_tensorrt
from random_steps import RandomSteps
from run_recorder import RunRecorder
from steps import Steps
from tensorrt_rig import describe_networks, evaluated_engine, rtx_config
from tensorrt_walks import IDS, LIMITS, with_features
from tiny_folders import build_tiny_engine, folder_family, write_tiny_family

FAMILY = folder_family((2, 6), (0,), "qwen2", qkv_bias=True)  # two layers a group; m = 1, 2


def llm_config(**settings) -> BuildConfig:
    defaults = {"target": "tensorrt-llm", "dtype": "float16", "limits": LIMITS}
    return rtx_config(**{**defaults, **settings})


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    return write_tiny_family(tmp_path_factory.mktemp("family") / "f", FAMILY)


@pytest.fixture(scope="module")
def plugins(family):
    """Of the second segment: four layers in two layer groups."""
    described = describe_networks(family, llm_config())
    yield described[1].emitter.network.plugins
    del described


# -- the plugin ----------------------------------------------------------------------------------


def test_plugin_has_its_inputs_in_order(plugins):
    names = list(INPUTS[1:])
    for plugin in plugins:
        assert plugin.name == "GPTAttention"
        assert plugin.input_names()[1:] == names
    shapes = {t.name: (t.dtype, tuple(t.shape)) for t in plugins[0].inputs[1:]}
    one, pools = (trt.int32, (-1,)), (trt.int32, (4, -1, 2, -1))
    qkv = plugins[0].inputs[0]
    assert (qkv.dtype, tuple(qkv.shape)) == (trt.float16, (-1, 128))
    assert shapes == {
        **dict.fromkeys(("sequence_length", "host_past_key_value_lengths"), one),
        **dict.fromkeys(("context_lengths", "host_context_lengths", "host_request_types"), one),
        **dict.fromkeys(("kv_cache_block_offsets", "host_kv_cache_block_offsets"), pools),
        "host_max_attention_window_sizes": (trt.int32, (4,)),
        "host_sink_token_length": (trt.int32, (1,)),
        "cache_indirection": (trt.int32, (-1, 1, 128)),
        "host_kv_cache_pool_pointers": (trt.int64, (4, 2)),
        "host_kv_cache_pool_mapping": (trt.int32, (4, 2)),
        "host_runtime_perf_knobs": (trt.int64, (16,)),
        "host_context_progress": (trt.int64, (1,)),
    }


def test_plugin_has_every_field_that_its_library_asks_for(plugins):
    for layer, plugin in enumerate(plugins):
        fields = plugin.attributes
        assert fields.keys() == FIELDS.keys()
        assert fields["layer_idx"] == layer
        assert (fields["num_heads"], fields["num_kv_heads"], fields["head_size"]) == (4, 2, 16)
        assert (fields["tokens_per_block"], fields["paged_kv_cache"]) == (32, 1)
        assert (fields["remove_input_padding"], fields["use_paged_context_fmha"]) == (1, 1)
        assert (fields["position_embedding_type"], fields["rotary_embedding_dim"]) == (0, 0)
        assert fields["type_id"] == int(trt.float16)


# -- the network ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def error_of(family, tmp_path_factory):
    """A function: root mean square of the logits' error over their spread, in a random walk."""
    built = build_tiny_engine(family, tmp_path_factory.mktemp("engine") / "e", "reference")
    reference = Steps(with_features(load_engine(built)), IDS)

    def error() -> float:
        ours = Steps(with_features(evaluated_engine(family, llm_config())), IDS)
        walk, worst = RandomSteps(reference, seed=0), 0.0
        for _ in range(12):
            step = walk.next()
            expected, actual = (s.engine.execute(step).logits for s in (reference, ours))
            for a, b in zip(expected, actual, strict=True):
                if a is not None:
                    worst = max(worst, float(np.sqrt(np.mean((b - a) ** 2)) / a.std()))
        return worst

    return error


def test_network_and_inputs_give_the_reference_s_logits_with_a_plugin_that_does_as_documented(
    error_of,
):
    assert error_of() < 0.02


def test_decode_steps_are_not_recorded_since_the_plugin_reads_lengths_on_the_host(family):
    recorder = RunRecorder()
    engine = evaluated_engine(family, llm_config(), record_run=recorder)
    steps = Steps(with_features(engine), IDS)
    for position in range(3):
        steps.step((0, position, position + 1), (1, position, position + 1))
    assert recorder.counts() == (0, 0)


def _unrotated(emit, x, cos, sin):
    return x


def _swapped_halves(emit, x, cos, sin):
    return _rotary(emit, x, cos, emit.elementwise(sin, sin, emit.trt.ElementWiseOperation.SUB))


_rotary = TensorRtLlmEmitter.rotary_embedding


@pytest.mark.parametrize("fault", [_unrotated, _swapped_halves])
def test_fault_in_the_rotary_embedding_is_noticed(error_of, monkeypatch, fault):
    monkeypatch.setattr(TensorRtLlmEmitter, "rotary_embedding", fault)
    assert error_of() > 0.1


# -- refusals ------------------------------------------------------------------------------------


def test_without_tensorrt_llm_the_build_says_what_to_install(family, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt_llm", None)
    with full_tensorrt(), pytest.raises(ConfigError) as caught:
        build_engine(family, tmp_path / "e", llm_config())
    message = str(caught.value)
    assert message.startswith("target tensorrt-llm: cannot import tensorrt_llm (pip install")
    assert "mfs-trt[trtllm]" in message and "\n" not in message
    assert not (tmp_path / "e").exists()


def test_library_without_the_plugin_is_refused(monkeypatch):
    with llm_tensorrt() as api:
        api.module.get_plugin_registry().creators.clear()
        with pytest.raises(ConfigError, match="no GPTAttention; expected tensorrt-llm 1.x"):
            choose_way(api, FAMILY, llm_config(), ())


def test_sliding_windows_are_refused_with_a_target_that_has_them():
    windows = folder_family((1,), (), "mistral", sliding_window=9, windowed_layers=(0,))
    with llm_tensorrt() as api, pytest.raises(ConfigError, match="target tensorrt serves windows"):
        choose_way(api, windows, llm_config(), ())


def test_block_size_that_is_no_power_of_two_is_refused():
    with llm_tensorrt() as api, pytest.raises(ConfigError, match="power of two .* got 24"):
        choose_way(api, FAMILY, llm_config(block_size=24), ())


def test_types_that_the_plugin_does_not_compute_in_are_refused():
    with pytest.raises(
        ConfigError, match="dtype: expected float16, bfloat16 for target tensorrt-llm"
    ):
        llm_config(dtype="float32")
