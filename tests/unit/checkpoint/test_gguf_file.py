import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import dequantize

from gguf_files import SIZES, write_gguf
from mfs_trt.checkpoint.gguf_file import GgufFile
from mfs_trt.errors import CheckpointError


@pytest.fixture
def path(hf_folder, tmp_path):
    folder = hf_folder("llama", num_hidden_layers=2, **SIZES)
    return write_gguf(tmp_path / "m.gguf", folder, "Q4_0", some__list=[1, 2, 3], some__name="a b")


def test_metadata_and_table_equal_those_of_the_gguf_package(path):
    ours, theirs = GgufFile(path), GGUFReader(path)
    for key, value in ours.fields.items():
        assert value == theirs.fields[key].contents(), key
    assert list(ours.tensors) == [t.name for t in theirs.tensors]
    for row in theirs.tensors:
        tensor = ours.tensors[row.name]
        assert (tensor.first_byte, tensor.num_bytes) == (row.data_offset, row.n_bytes)
        assert tensor.shape == tuple(int(size) for size in reversed(row.shape))


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "TQ2_0"])
def test_block_types_are_dequantised_as_the_gguf_package_does(tmp_path, kind):
    qtype = GGMLQuantizationType[kind]
    block_size, block_bytes = GGML_QUANT_SIZES[qtype]
    raw = np.random.default_rng(0).integers(0, 60, (3, 2 * block_bytes), dtype=np.uint8)
    writer = GGUFWriter(tmp_path / "k.gguf", "llama")
    writer.add_tensor("x", raw, raw_dtype=qtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    loaded = GgufFile(tmp_path / "k.gguf").load("x")
    assert loaded.shape == (3, 2 * block_size)
    assert np.array_equal(loaded, dequantize(raw, qtype), equal_nan=True)


def test_file_cut_at_any_place_is_refused(path):
    data = path.read_bytes()
    last = list(GgufFile(path).tensors.values())[-1]
    end = last.first_byte + last.num_bytes
    for kept in (0, 3, 10, 30, 200, end // 2, end - 1):
        path.write_bytes(data[:kept])
        with pytest.raises(CheckpointError, match=r"m\.gguf"):
            GgufFile(path)


def test_other_files_are_refused(tmp_path):
    (tmp_path / "x").write_bytes(b"PK\x03\x04" * 100)
    with pytest.raises(CheckpointError, match="expected a GGUF file"):
        GgufFile(tmp_path / "x")


def test_unknown_version_is_refused(path):
    data = bytearray(path.read_bytes())
    data[4:8] = (9).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="version 2 or 3"):
        GgufFile(path)
