"""TensorRT networks with quantised weights give the numbers of the reference engine on those.

The reference runs a family folder whose matrices are the dequantised ones: what is compared is the
network, not the rounding.
"""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import tensorrt_rtx_bindings as trt
import torch

from mfs_trt.builder.emitters.tensorrt import TensorRtEmitter
from mfs_trt.builder.quantiser import quantise
from mfs_trt.builder.weight_formats import WEIGHT_FORMATS, format_of
from mfs_trt.engine import load_engine
from mfs_trt.tensor_names import EMBEDDING
from mfs_trt.weights.store import WeightStore
from mfs_trt.weights.writer import TensorEntry, write_family
from parity_families import FAMILIES, PLAIN
from random_steps import RandomSteps
from steps import Steps
from tensorrt_rig import describe_networks, evaluated_engine, full_config, rtx_config
from tensorrt_walks import (
    FAULTY,
    IDS,
    LIMITS,
    TOLERANCE,
    error_of_a_walk,
    largest_error,
    with_features,
)
from tiny_folders import build_tiny_engine, write_tiny_family

TIED = "qwen3, tied and own head, m = 2, 1"
GPUS = {"compute_capabilities": ("sm89",)}  # the first that takes all formats


def write_dequantised(folder, source, weight_format):
    """The family with every quantised matrix as it is multiplied out; a tied head as one apart."""
    store = WeightStore(source)
    model = replace(store.spec.model, tie_word_embeddings=False)
    spec = replace(store.spec, model=model)
    heads = {spec.head_name(tier): store.spec.head_name(tier) for tier in range(len(spec.tiers))}

    def load(name):
        tensor = store.get(heads.get(name, name))
        kind = format_of(name, tensor.shape, weight_format) if name != EMBEDDING else ""
        return quantise(tensor, kind, tensor.dtype).dequantised() if kind else tensor

    entries = [
        TensorEntry(name, shape, "float32", partial(load, name))
        for name, shape in spec.tensor_shapes().items()
    ]
    write_family(folder, model, spec.tiers, "float32", entries)
    return folder


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """A function `(family folder, weight format) -> steps` on dequantised weights."""

    def get(source, weight_format):
        folder = tmp_path_factory.mktemp("dequantised")
        family = write_dequantised(folder / "f", source, weight_format)
        built = build_tiny_engine(family, folder / "e", "reference", limits=LIMITS)
        return Steps(with_features(load_engine(built)), IDS)

    return get


def evaluated(folder, weight_format, make_config=rtx_config):
    gpus = GPUS if make_config is rtx_config else {}
    config = make_config(limits=LIMITS, weight_format=weight_format, **gpus)
    return Steps(with_features(evaluated_engine(folder, config)), IDS)


@pytest.fixture(scope="module", params=[PLAIN, TIED])
def folder(request, tmp_path_factory):
    return write_tiny_family(tmp_path_factory.mktemp("family") / "f", FAMILIES[request.param])


@pytest.fixture(scope="module")
def faulty_folder(tmp_path_factory):
    return write_tiny_family(tmp_path_factory.mktemp("family") / "f", FAULTY)


@pytest.mark.parametrize("weight_format", WEIGHT_FORMATS)
def test_random_steps_equal_the_reference_on_dequantised_weights(folder, reference, weight_format):
    theirs, ours = reference(folder, weight_format), evaluated(folder, weight_format)
    walk, num_steps = RandomSteps(theirs, seed=0), 0
    while not walk.is_done and num_steps < 12:
        step = walk.next()
        expected, actual = (s.engine.execute(step).logits for s in (theirs, ours))
        assert largest_error(expected, actual) < TOLERANCE
        num_steps += 1
    assert num_steps == 12


def test_plans_with_plugins_take_quantised_weights_too(faulty_folder, reference):
    theirs = reference(faulty_folder, "int4")
    assert error_of_a_walk(theirs, evaluated(faulty_folder, "int4", full_config)) < TOLERANCE


@pytest.mark.parametrize("weight_format", WEIGHT_FORMATS)
def test_every_matrix_of_a_plan_is_stored_in_the_format(faulty_folder, weight_format):
    """Seven matrices a layer; a head in 8 bits at least."""
    config = rtx_config(limits=LIMITS, weight_format=weight_format, **GPUS)
    types = {"int8": trt.int8, "int4": trt.int4, "fp8": trt.fp8}
    networks = describe_networks(faulty_folder, config)
    for network, num_layers in zip(networks, (1, 2, 0), strict=True):
        definition = network.emitter.network
        stored = []
        for i in range(definition.num_layers):
            layer = definition.get_layer(i)
            if layer.type == trt.LayerType.DEQUANTIZE:
                stored.append(layer.get_input(0).dtype)
        in_head = "int8" if weight_format == "int4" else weight_format
        expected = [types[weight_format]] * 7 * num_layers if num_layers else [types[in_head]]
        assert stored == expected


@pytest.mark.gpu
@pytest.mark.parametrize("weight_format", WEIGHT_FORMATS)
def test_built_plans_on_a_gpu_come_close_to_the_reference(
    folder, reference, tmp_path, weight_format
):
    """The library's own reading of packed numbers, blocks and axes."""
    gpu = "sm{}{}".format(*torch.cuda.get_device_capability())
    settings = {"limits": LIMITS, "weight_format": weight_format, "compute_capabilities": (gpu,)}
    engine = load_engine(build_tiny_engine(folder, tmp_path / "e", "tensorrt-rtx", **settings))
    theirs, ours = reference(folder, weight_format), Steps(with_features(engine), IDS)
    for items in ([(0, 0, 65), (1, 0, 2)], [(0, 65, 66), (1, 2, 3)]):
        for expected, actual in zip(theirs.step(*items), ours.step(*items), strict=True):
            assert np.abs(actual - expected).max() < 1e-2 * expected.std()
    engine.close()


# -- seeded faults -------------------------------------------------------------------------------

_dequantised = TensorRtEmitter.dequantised


def _other_axis(emit, weight):
    """Scales of output channels taken for those of input channels, where the matrix is square."""
    tensor = _dequantised(emit, weight)
    if weight.scale.dim() == 1 and weight.values.shape[0] == weight.values.shape[1]:
        layer = emit.network.get_layer(emit.network.num_layers - 1)
        layer.__class__ = trt.IDequantizeLayer
        layer.axis = 1
    return tensor


def _scales_of_the_next_channel(emit, weight):
    return _dequantised(emit, replace(weight, scale=weight.scale.roll(1, 0).contiguous()))


def _scales_of_the_next_block(emit, weight):
    if weight.scale.dim() == 2:
        weight = replace(weight, scale=weight.scale.roll(1, 1).contiguous())
    return _dequantised(emit, weight)


def _largest_number_for_the_scale(emit, weight):
    """As if int8 reached 128 and int4 reached 8."""
    largest = 127 / 128 if weight.weight_format == "int8" else 7 / 8
    return _dequantised(emit, replace(weight, scale=weight.scale * largest))


def _blocks_across_rows(emit, weight):
    if weight.scale.dim() == 2:
        scale = weight.scale.T.reshape(weight.scale.shape).contiguous()
        weight = replace(weight, scale=scale)
    return _dequantised(emit, weight)


def _swapped_nibbles(emit, weight):
    if weight.weight_format == "int4":
        pairs = weight.values.reshape(-1, 2).flip(1)
        weight = replace(weight, values=pairs.reshape(weight.values.shape).contiguous())
    return _dequantised(emit, weight)


FAULTS = {
    "axis of input channels": ("int8", _other_axis),
    "axis of input channels, fp8": ("fp8", _other_axis),
    "scales of the next channel": ("int8", _scales_of_the_next_channel),
    "scales of the next channel, fp8": ("fp8", _scales_of_the_next_channel),
    "scales of the next block": ("int4", _scales_of_the_next_block),
    "scale of one number more": ("int8", _largest_number_for_the_scale),
    "scale of one number more, int4": ("int4", _largest_number_for_the_scale),
    "blocks across rows": ("int4", _blocks_across_rows),
    "nibbles swapped": ("int4", _swapped_nibbles),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_in_quantised_weights_is_noticed(faulty_folder, reference, monkeypatch, fault):
    weight_format, replacement = FAULTS[fault]
    theirs = reference(faulty_folder, weight_format)
    monkeypatch.setattr(TensorRtEmitter, "dequantised", replacement)
    error = error_of_a_walk(theirs, evaluated(faulty_folder, weight_format))
    assert error > 20 * TOLERANCE, error


def test_dequantised_weights_of_fp16_networks_are_those_of_the_quantiser(faulty_folder):
    """Products are rounded to the network's own type."""
    from tensorrt_evaluator import EvaluatedPlan

    config = rtx_config(limits=LIMITS, weight_format="fp8", dtype="float16", **GPUS)
    (head,) = describe_networks(faulty_folder, config)[-1:]
    plan = EvaluatedPlan(head.emitter.network)
    hidden = FAULTY.model.hidden_size
    rows, gains = torch.eye(hidden).half() * hidden**0.5, torch.ones(len(FAULTY.tiers), hidden)
    tensors = {"rows": rows, "gains": gains.half(), "tiers": torch.zeros(hidden).int()}
    tensors |= {"exit_rows": torch.arange(hidden).int()} if "exit_rows" in plan.inputs else {}
    logits = plan.run(tensors, 0)
    weight = WeightStore(faulty_folder).get(FAULTY.head_name(0)).half()
    expected = quantise(weight, "fp8", torch.float16).dequantised().T
    np.testing.assert_allclose(logits, expected * hidden**0.5, rtol=2e-3, atol=2e-3)
