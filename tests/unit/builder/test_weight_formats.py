"""Quantised weights of TensorRT builds: which GPUs take which format, and what it saves."""

import weakref
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from mfs_trt.builder.build import build_engine
from mfs_trt.builder.config import BuildConfig
from mfs_trt.builder.tensorrt import TensorRtBuilder, built_for
from mfs_trt.builder.weight_formats import WEIGHT_FORMATS, check_gpus, format_of
from mfs_trt.engine.manifest import EngineManifest
from mfs_trt.engine.tensorrt_api import load_api
from mfs_trt.errors import ConfigError
from tensorrt_rig import rtx_config
from tiny_folders import folder_family, write_tiny_family

GPUS = {  # that RTX 1.7 builds a format for
    "int8": ("sm75", "sm80", "sm86", "sm89", "sm120", "sm121"),
    "int4": ("sm80", "sm86", "sm89", "sm120", "sm121"),
    "fp8": ("sm89", "sm120", "sm121"),
}
REFUSED = [("int4", "sm75"), ("fp8", "sm86")]
HIDDEN, WIDTH, VOCAB = 128, 16384, 16000


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    """Most of its bytes are matrices."""
    spec = folder_family((1,), hidden_size=HIDDEN, intermediate_size=WIDTH, vocab_size=VOCAB)
    return write_tiny_family(tmp_path_factory.mktemp("family") / "f", spec, "float16")


def plan_sizes(family, out, *gpus, **settings) -> dict[str, int]:
    config = rtx_config(dtype="float16", compute_capabilities=gpus, **settings)
    built = build_engine(family, out, config)
    assert EngineManifest.load(built).weight_format == config.weight_format
    return {p.stem: p.stat().st_size for p in built.glob("*.plan")}


@pytest.fixture(scope="module")
def plain_sizes(family, tmp_path_factory):
    return plan_sizes(family, tmp_path_factory.mktemp("engine") / "e", "sm89")


@pytest.mark.parametrize(
    ("weight_format", "in_layers", "in_head"), [("int8", 1, 1), ("int4", 1.5, 1), ("fp8", 1, 1)]
)
def test_plans_for_all_gpus_of_a_format_are_smaller_by_what_their_matrices_save(
    family, plain_sizes, tmp_path, weight_format, in_layers, in_head
):
    """`in_layers`, `in_head`: bytes that a weight takes less than in fp16."""
    sizes = plan_sizes(family, tmp_path / "e", *GPUS[weight_format], weight_format=weight_format)
    for name, count, fewer in (
        ("segment_0", 3 * HIDDEN * WIDTH, in_layers),
        ("head_0", HIDDEN * VOCAB, in_head),
    ):
        saved = plain_sizes[name] - sizes[name]
        assert saved == pytest.approx(fewer * count, rel=0.15), name


def test_weights_of_a_plan_are_let_go_before_the_next_is_described(tmp_path, monkeypatch):
    """A family's weights would be in memory at once, beside what the library builds."""
    alive: list[weakref.ref] = []
    networks = TensorRtBuilder.networks

    def watched(builder):
        def describing(describe):
            assert not [ref for ref in alive if ref() is not None]
            network = describe()
            alive.append(weakref.ref(network.emitter))
            return network

        return [partial(describing, describe) for describe in networks(builder)]

    monkeypatch.setattr(TensorRtBuilder, "networks", watched)
    family = write_tiny_family(tmp_path / "f", folder_family((1, 2)))
    assert len(plan_sizes(family, tmp_path / "e", "sm86")) == len(alive) == 3


# -- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("weight_format", "gpu"), REFUSED)
def test_gpus_that_do_not_take_a_format_are_refused_as_the_library_would(
    tmp_path, monkeypatch, weight_format, gpu
):
    """By name before any work; without that, by RTX."""
    with pytest.raises(ConfigError, match=f"weight_format: {weight_format} on .* got {gpu}; int8"):
        rtx_config(dtype="float16", compute_capabilities=(gpu,), weight_format=weight_format)
    monkeypatch.setattr("mfs_trt.builder.config.check_gpus", lambda *arguments: None)
    family = write_tiny_family(tmp_path / "f", folder_family((1,)))
    with pytest.raises(ConfigError, match=f"cannot build .* {gpu}, because .* datatypes"):
        plan_sizes(family, tmp_path / "e", gpu, weight_format=weight_format)


def test_refusal_names_target_gpus_and_what_can():
    with pytest.raises(ConfigError) as caught:
        check_gpus("fp8", "tensorrt-rtx", ("sm80", "sm89", "sm86"))
    assert str(caught.value) == (
        "weight_format: fp8 on tensorrt-rtx needs GPUs from sm89 on, got sm80, sm86; "
        "int8 and int4 can there"
    )
    with pytest.raises(ConfigError, match="needs GPUs from sm80 on, got sm75; int8 can there"):
        check_gpus("int4", "tensorrt-rtx", ("sm75",))


def test_fp8_without_gpus_named_is_refused_since_the_default_has_older_ones():
    message = "got sm80, sm86, which tensorrt-rtx builds for unless told otherwise; int8 and int4"
    with pytest.raises(ConfigError, match=message):
        rtx_config(weight_format="fp8")


def test_full_tensorrt_asks_the_gpu_of_this_machine(monkeypatch):
    module = SimpleNamespace(__version__="11.3")
    api = replace(load_api("tensorrt-rtx"), module=module, target="tensorrt")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 6))
    config = BuildConfig(target="tensorrt", dtype="float16", weight_format="fp8")
    with pytest.raises(ConfigError, match="fp8 on tensorrt needs GPUs from sm89 on, got sm86"):
        built_for(api, config)
    assert built_for(api, replace(config, weight_format="int4")) == ("sm86",)


@pytest.mark.parametrize(
    ("target", "weight_format", "expected"),
    [
        ("cuda", "int8", "expected none for target cuda, got 'int8'; openvino, tensorrt, "),
        ("openvino", "fp8", "expected int8, int4 for target openvino, got 'fp8'; tensorrt, "),
        ("tensorrt-rtx", "int2", "expected int8, int4, fp8 for target tensorrt-rtx, got 'int2'$"),
    ],
)
def test_format_that_a_target_does_not_take_is_refused_with_those_that_do(
    target, weight_format, expected
):
    with pytest.raises(ConfigError, match=f"weight_format: {expected}"):
        BuildConfig(target=target, weight_format=weight_format)


# -- which weights -------------------------------------------------------------------------------


@pytest.mark.parametrize("weight_format", WEIGHT_FORMATS)
def test_matrices_are_quantised_and_heads_in_8_bits_at_least(weight_format):
    in_head = "int8" if weight_format == "int4" else weight_format
    names = {
        "layers.0.mlp.up_proj.weight": ((8, 4), weight_format),
        "layers.0.input_layernorm.weight": ((4,), ""),
        "layers.0.self_attn.q_proj.bias": ((4,), ""),
        "lm_head.weight": ((9, 4), in_head),
        "embed_tokens.weight": ((9, 4), in_head),
    }
    for name, (shape, expected) in names.items():
        assert format_of(name, shape, weight_format) == expected
        assert format_of(name, shape, "") == ""
