"""A fault in how the TensorRT network calls its plugins changes what it computes, and is noticed.

That the network without one equals the reference is in `test_tensorrt_network`, for both ways.
"""

from dataclasses import replace

import pytest
import tensorrt_rtx_bindings as rtx
import torch

from mfs_trt.builder.emitters.tensorrt import TensorRtEmitter
from mfs_trt.builder.emitters.tensorrt_plugins import PluginAttention
from mfs_trt.engine import load_engine
from mfs_trt.plugins import trt_layers
from steps import Steps
from tensorrt_rig import LAUNCH, evaluated_engine, full_config
from tensorrt_walks import FAULTY, IDS, LIMITS, TOLERANCE, error_of_a_walk, with_features
from tiny_folders import build_tiny_engine, write_tiny_family

_add_attention, _add_kv_write = trt_layers.add_paged_attention, trt_layers.add_kv_write
_add_tier_exit, _heads = trt_layers.add_tier_exit, PluginAttention._heads
_input = TensorRtEmitter.input


def _attention_with(**changed):
    """Each setting as its function makes it of what it was."""

    def add(*inputs, **settings):
        wrong = {name: change(settings[name]) for name, change in changed.items()}
        return _add_attention(*inputs, **{**settings, **wrong})

    return add


def _keys_read_for_values(network, query, keys, values, *rest, **settings):
    return _add_attention(network, query, keys, keys, *rest, **settings)


def _slots_of_the_first_group(*inputs, group, **settings):
    return _add_kv_write(*inputs, group=0, **settings)


def _keys_written_for_values(network, key, value, *rest, **settings):
    return _add_kv_write(network, key, key, *rest, **settings)


def _query_heads_in_turn(attention, rows, num_heads):
    """Head h is made of the elements h, h + heads, … of a row."""
    if num_heads != attention._model.num_heads:
        return _heads(attention, rows, num_heads)
    shape = (-1, attention._model.head_dim, num_heads)
    return attention._layers.shuffle(rows, shape=shape, after=(0, 2, 1))


def _lengths_one_less(emit, name, dtype, shape):
    tensor = _input(emit, name, dtype, shape)
    if name != "seq_lens":
        return tensor
    one = emit.scalar(1, torch.int32, 1)
    return emit.elementwise(tensor, one, emit.trt.ElementWiseOperation.SUB)


def _first_rows_for_exit_rows(network, hidden, exit_rows, tiers, gains, **settings):
    return _add_tier_exit(network, hidden, tiers, tiers, gains, **settings)


def _gain_of_the_first_tier(network, hidden, exit_rows, tiers, gains, **settings):
    first = network.add_elementwise(tiers, tiers, rtx.ElementWiseOperation.SUB).get_output(0)
    return _add_tier_exit(network, hidden, exit_rows, first, gains, **settings)


def _eps_a_thousandfold(*inputs, eps, **settings):
    return _add_tier_exit(*inputs, eps=1000 * eps, **settings)


_ATTENTION = (trt_layers, "add_paged_attention")
_WRITE = (trt_layers, "add_kv_write")
_EXIT = (trt_layers, "add_tier_exit")
FAULTS = {
    "attention's scale": (*_ATTENTION, _attention_with(scale=lambda scale: 2 * scale)),
    "window one wider": (
        *_ATTENTION,
        _attention_with(window=lambda w: None if w is None else w + 1),
    ),
    "no window": (*_ATTENTION, _attention_with(window=lambda window: None)),
    "blocks of another layer group": (*_ATTENTION, _attention_with(group=lambda group: 0)),
    "keys read for values": (*_ATTENTION, _keys_read_for_values),
    "slots of another layer group": (*_WRITE, _slots_of_the_first_group),
    "keys written for values": (*_WRITE, _keys_written_for_values),
    "query heads in turn": (PluginAttention, "_heads", _query_heads_in_turn),
    "lengths before the step": (TensorRtEmitter, "input", _lengths_one_less),
    "other rows leave": (*_EXIT, _first_rows_for_exit_rows),
    "another tier's gain": (*_EXIT, _gain_of_the_first_tier),
    "norm's epsilon": (*_EXIT, _eps_a_thousandfold),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_family(tmp_path_factory.mktemp("family") / "f", FAULTY)


@pytest.fixture(scope="module")
def error_of(folder, tmp_path_factory):
    """A function `launch -> largest error` against the reference, of networks described now."""
    built = build_tiny_engine(folder, tmp_path_factory.mktemp("engine") / "e", "reference")
    reference = Steps(with_features(load_engine(built)), IDS)

    def error(launch=LAUNCH) -> float:
        engine = evaluated_engine(folder, full_config(limits=LIMITS), launch)
        return error_of_a_walk(reference, Steps(with_features(engine), IDS))

    return error


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_in_a_plugin_layer_is_noticed(error_of, monkeypatch, fault):
    monkeypatch.setattr(*FAULTS[fault])
    assert error_of() > 20 * TOLERANCE


def test_attention_that_is_split_over_keys_equals_the_reference(error_of):
    assert error_of(replace(LAUNCH, num_splits=4)) < TOLERANCE
