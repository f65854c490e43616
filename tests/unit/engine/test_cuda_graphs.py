"""Recorded runs: one recording a bucket, replays at the recorded addresses, and the switch."""

import numpy as np
import pytest
import torch

from mfs_trt.engine.cuda_graphs import SWITCH, DecodeGraphs, Recorded, uses_graphs
from mfs_trt.engine.packed_arrays import PackedArrays
from mfs_trt.errors import ConfigError

CPU = torch.device("cpu")


class Recorder:
    """Records `output = a + fixed`, and counts."""

    def __init__(self) -> None:
        self.num_recorded = self.num_replayed = 0

    def __call__(self, tensors) -> Recorded:
        self.num_recorded += 1
        output = torch.zeros_like(tensors["fixed"])

        def replay():
            self.num_replayed += 1
            output.copy_(tensors["a"] + tensors["fixed"])

        return Recorded(replay, output)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def graphs(recorder) -> DecodeGraphs:
    return DecodeGraphs(recorder, CPU, max_graphs=2)


FIXED = {"fixed": torch.tensor([10.0, 20.0])}


def array(*values) -> dict[str, np.ndarray]:
    return {"a": np.array(values, np.int32)}


def test_a_bucket_is_recorded_once_and_replayed_with_new_arrays(graphs, recorder):
    for values in ((1, 2), (3, 4), (5, 6)):
        assert graphs.run("b", array(*values), FIXED).tolist() == [10 + values[0], 20 + values[1]]
    assert (recorder.num_recorded, recorder.num_replayed) == (1, 3)


def test_fixed_tensors_are_read_where_they_are(graphs, recorder):
    fixed = {"fixed": torch.tensor([10.0, 20.0])}
    graphs.run("b", array(1, 2), fixed)
    fixed["fixed"].fill_(7)
    assert graphs.run("b", array(1, 2), fixed).tolist() == [8, 9]
    assert recorder.num_recorded == 1


def test_other_addresses_are_never_replayed(graphs, recorder):
    graphs.run("b", array(1, 2), FIXED)
    other = {"fixed": torch.tensor([1.0, 1.0])}
    assert graphs.run("b", array(1, 2), other).tolist() == [2, 3]
    assert recorder.num_recorded == 2


def test_other_shapes_are_never_replayed(graphs, recorder):
    graphs.run("b", array(1, 2), FIXED)
    assert graphs.run("b", array(3), FIXED).tolist() == [13, 23]
    part = {"fixed": FIXED["fixed"][:1]}
    assert graphs.run("b", array(3), part).tolist() == [13]
    assert recorder.num_recorded == 3


def test_the_bucket_not_used_for_longest_makes_room(graphs, recorder):
    for bucket in ("a", "b", "a", "c", "a"):  # b goes for c
        graphs.run(bucket, array(1, 2), FIXED)
    assert recorder.num_recorded == 3
    graphs.run("b", array(1, 2), FIXED)
    assert recorder.num_recorded == 4


def test_filled_arrays_keep_their_addresses():
    packed = PackedArrays({"a": np.arange(3, dtype=np.int32), **array_2d(1)}, CPU)
    before = {name: tensor.data_ptr() for name, tensor in packed.tensors.items()}
    packed.fill({"a": np.arange(3, 6, dtype=np.int32), **array_2d(9)})
    assert {name: tensor.data_ptr() for name, tensor in packed.tensors.items()} == before
    assert packed.tensors["a"].tolist() == [3, 4, 5]
    assert packed.tensors["table"].tolist() == [[9, 9], [9, 9]]
    assert packed.takes({"a": np.zeros(3, np.int32), **array_2d(0)})
    assert not packed.takes({"a": np.zeros(4, np.int32), **array_2d(0)})
    assert not packed.takes({"a": np.zeros(3, np.int32)})


def array_2d(value: int) -> dict[str, np.ndarray]:
    return {"table": np.full((2, 2), value, np.int32)}


@pytest.mark.parametrize(("value", "expected"), [(None, True), ("1", True), ("0", False)])
def test_the_operator_switches_graphs_off(monkeypatch, value, expected):
    monkeypatch.delenv(SWITCH, raising=False)
    if value is not None:
        monkeypatch.setenv(SWITCH, value)
    assert uses_graphs() == expected


def test_another_value_of_the_switch_is_refused(monkeypatch):
    monkeypatch.setenv(SWITCH, "off")
    with pytest.raises(ConfigError, match="MFS_TRT_CUDA_GRAPHS: expected 0 or 1, got 'off'"):
        uses_graphs()
