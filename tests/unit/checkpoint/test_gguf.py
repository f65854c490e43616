import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from gguf_files import SIZES, write_gguf
from mfs_trt.checkpoint import open_checkpoint
from mfs_trt.checkpoint.hf import HfCheckpoint
from mfs_trt.errors import CheckpointError

UP = "layers.1.mlp.up_proj.weight"
QUERY = "layers.1.self_attn.q_proj.weight"


@pytest.fixture
def folder(hf_folder):
    return hf_folder("llama", num_hidden_layers=2, **SIZES)


def test_float_weights_come_back_bit_for_bit(folder, tmp_path):
    reader, original = (
        open_checkpoint(write_gguf(tmp_path / "m.gguf", folder)),
        HfCheckpoint(folder),
    )
    for name in (UP, QUERY, "layers.0.self_attn.k_proj.weight", "norm.weight", "lm_head.weight"):
        assert torch.equal(reader.load(name), original.load(name)), name


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4"])
def test_quantised_weights_are_what_their_blocks_mean(folder, tmp_path, kind):
    qtype = GGMLQuantizationType[kind]
    reader = open_checkpoint(write_gguf(tmp_path / "m.gguf", folder, kind))
    original = HfCheckpoint(folder).load(UP).numpy()
    assert np.array_equal(reader.load(UP).numpy(), dequantize(quantize(original, qtype), qtype))
    assert reader.dtype == "float32"


@pytest.mark.parametrize(
    ("kind", "dtype"), [("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16")]
)
def test_float_files_keep_their_dtype(folder, tmp_path, kind, dtype):
    reader = open_checkpoint(write_gguf(tmp_path / "m.gguf", folder, kind))
    assert reader.dtype == dtype
    assert reader.load(QUERY).dtype == getattr(torch, dtype)
    rounded = HfCheckpoint(folder).load(QUERY).to(getattr(torch, dtype))
    assert torch.equal(reader.load(QUERY), rounded)


def test_tied_model_has_no_head(hf_folder, tmp_path):
    folder = hf_folder("llama", num_hidden_layers=2, tie_word_embeddings=True, **SIZES)
    assert open_checkpoint(write_gguf(tmp_path / "m.gguf", folder)).config.tie_word_embeddings


def test_attention_biases_are_permuted_with_their_rows(hf_folder, tmp_path):
    folder = hf_folder("llama", num_hidden_layers=2, attention_bias=True, **SIZES)
    reader = open_checkpoint(write_gguf(tmp_path / "m.gguf", folder))
    name = "layers.1.self_attn.q_proj.bias"
    assert torch.equal(reader.load(name), HfCheckpoint(folder).load(name))


def test_rope_factors_are_settings_and_not_weights(folder, tmp_path):
    factors = {"rope_freqs.weight": np.linspace(1, 8, 8, dtype=np.float32)}
    reader = open_checkpoint(write_gguf(tmp_path / "m.gguf", folder, extra_tensors=factors))
    assert reader.config.rope.scaling["short_factor"] == factors["rope_freqs.weight"].tolist()


def test_unknown_tensor_is_named(folder, tmp_path):
    extra = {"blk.0.ssm_a.weight": np.zeros(4, np.float32)}
    path = write_gguf(tmp_path / "m.gguf", folder, extra_tensors=extra)
    with pytest.raises(CheckpointError, match=r"blk\.0\.ssm_a\.weight \[4\]"):
        open_checkpoint(path)


def test_missing_layer_is_named(folder, tmp_path):
    path = write_gguf(tmp_path / "m.gguf", folder, llama__block_count=3)
    with pytest.raises(CheckpointError, match=r"missing.*layers\.2\."):
        open_checkpoint(path)


def test_end_tokens_are_eos_and_eot(folder, tmp_path):
    ends = {"tokenizer__ggml__eos_token_id": 7, "tokenizer__ggml__eot_token_id": 5}
    assert open_checkpoint(write_gguf(tmp_path / "m.gguf", folder, **ends)).end_token_ids == (5, 7)
