import pytest
import safetensors.torch
import torch

from mfs_trt.checkpoint.safetensors_file import SafetensorsFile, SafetensorsWriter
from mfs_trt.errors import CheckpointError


def write(path, tensors):
    entries = [(n, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in tensors.items()]
    with SafetensorsWriter(path, entries) as out:
        for tensor in tensors.values():
            out.write(tensor)
    return path


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_written_file_is_read_by_safetensors(tmp_path, dtype):
    tensors = {"b": torch.randn(3, 5).to(dtype), "a": torch.randn(7).to(dtype)}
    loaded = safetensors.torch.load_file(write(tmp_path / "x.safetensors", tensors))
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)


def test_transposed_view_is_written_in_its_logical_order(tmp_path):
    tensor = torch.randn(3, 5).T
    path = write(tmp_path / "x.safetensors", {"a": tensor})
    assert torch.equal(SafetensorsFile(path).get("a"), tensor)


def test_infos_give_shape_and_dtype_in_file_order(tmp_path):
    tensors = {"b": torch.zeros(3, 5), "a": torch.zeros(7)}
    infos = SafetensorsFile(write(tmp_path / "x.safetensors", tensors)).infos()
    assert list(infos.items()) == [("b", ((3, 5), "float32")), ("a", ((7,), "float32"))]


def test_tensor_of_another_shape_than_announced_is_a_fault(tmp_path):
    with (
        pytest.raises(AssertionError, match="announced"),
        SafetensorsWriter(tmp_path / "x", [("a", (2,), "float32")]) as out,
    ):
        out.write(torch.zeros(3))


def test_missing_tensor_is_a_fault(tmp_path):
    with (
        pytest.raises(AssertionError, match="wrote 0 of 1"),
        SafetensorsWriter(tmp_path / "x", [("a", (2,), "float32")]),
    ):
        pass


@pytest.mark.parametrize("kept", [0, 5, 60, -1])
def test_truncated_file_is_refused_by_name(tmp_path, kept):
    path = write(tmp_path / "x.safetensors", {"a": torch.zeros(64)})
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=r"x\.safetensors"):
        SafetensorsFile(path)


def test_missing_file_is_refused_by_name(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere"):
        SafetensorsFile(tmp_path / "nowhere")
