import json

import pytest
import safetensors.torch
import torch

from mfs_trt.checkpoint import open_checkpoint
from mfs_trt.checkpoint.hf import HfCheckpoint
from mfs_trt.checkpoint.trtllm import write_trtllm_checkpoint
from mfs_trt.errors import CheckpointError, ConfigError
from mfs_trt.family.tiers import parse_tiers
from mfs_trt.weights.convert import convert_checkpoint
from mfs_trt.weights.store import WeightStore
from mfs_trt.weights.tier import TierCheckpoint


@pytest.fixture
def written(hf_folder, tmp_path):
    """A function `(tp, **config overrides) -> (HF folder, TensorRT-LLM folder)`."""

    def write(tp=1, architecture="llama", **overrides):
        folder = hf_folder(architecture, num_hidden_layers=2, **overrides)
        convert_checkpoint(HfCheckpoint(folder), parse_tiers("1,2", 2), tmp_path / "family")
        tier = TierCheckpoint(WeightStore(tmp_path / "family"), "large")
        write_trtllm_checkpoint(tier, tmp_path / "trt", tp)
        return folder, tmp_path / "trt"

    return write


def edit_config(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def edit_rank(folder, rank, change):
    path = folder / f"rank{rank}.safetensors"
    tensors = dict(safetensors.torch.load_file(path))
    change(tensors)
    safetensors.torch.save_file(tensors, path)


def test_gate_and_up_are_stored_under_swapped_names(written):
    folder, trt = written()
    rank = safetensors.torch.load_file(trt / "rank0.safetensors")
    original, prefix = HfCheckpoint(folder), "transformer.layers.1.mlp."
    assert torch.equal(rank[prefix + "fc.weight"], original.load("layers.1.mlp.gate_proj.weight"))
    assert torch.equal(rank[prefix + "gate.weight"], original.load("layers.1.mlp.up_proj.weight"))


def test_a_rank_holds_its_own_heads_of_q_k_and_v(written):
    folder, trt = written(tp=2)  # 4 query heads, 2 KV heads of 12
    original = HfCheckpoint(folder)
    q, k, v = (original.load(f"layers.1.self_attn.{name}_proj.weight") for name in "qkv")
    rank = safetensors.torch.load_file(trt / "rank1.safetensors")
    expected = torch.cat([q[24:48], k[12:24], v[12:24]])
    assert torch.equal(rank["transformer.layers.1.attention.qkv.weight"], expected)


def test_fewer_kv_heads_than_ranks_are_repeated(written):
    folder, trt = written(tp=4)
    k = HfCheckpoint(folder).load("layers.1.self_attn.k_proj.weight")
    for rank, first in ((0, 0), (1, 0), (2, 12), (3, 12)):
        tensors = safetensors.torch.load_file(trt / f"rank{rank}.safetensors")
        qkv = tensors["transformer.layers.1.attention.qkv.weight"]
        assert torch.equal(qkv[12:24], k[first : first + 12]), rank


def test_output_projections_are_cut_by_columns(written):
    folder, trt = written(tp=2)
    o = HfCheckpoint(folder).load("layers.0.self_attn.o_proj.weight")
    rank = safetensors.torch.load_file(trt / "rank1.safetensors")
    assert torch.equal(rank["transformer.layers.0.attention.dense.weight"], o[:, 24:])


def test_vocabulary_is_padded_with_zeros_and_trimmed_again(written):
    folder, trt = written(tp=2)  # 199 tokens
    head = HfCheckpoint(folder).load("lm_head.weight")
    rank = safetensors.torch.load_file(trt / "rank1.safetensors")["lm_head.weight"]
    assert rank.shape == (100, 48)
    assert torch.equal(rank[:99], head[100:])
    assert not rank[99].any()
    assert torch.equal(open_checkpoint(trt).load("lm_head.weight"), head)


def test_more_padding_than_needed_is_trimmed(written):
    folder, trt = written()

    def pad(tensors):
        extra = torch.zeros(57, 48)
        tensors["lm_head.weight"] = torch.cat([tensors["lm_head.weight"], extra])

    edit_rank(trt, 0, pad)
    head = open_checkpoint(trt).load("lm_head.weight")
    assert torch.equal(head, HfCheckpoint(folder).load("lm_head.weight"))


@pytest.mark.parametrize("dim", [0, 1])
def test_cut_embedding_is_merged_along_either_axis(written, dim):
    folder, trt = written(tp=2)
    embedding = HfCheckpoint(folder).load("embed_tokens.weight")
    padded = torch.cat([embedding, torch.zeros(1, 48)]) if dim == 0 else embedding
    for rank, part in enumerate(padded.chunk(2, dim)):
        name = {"transformer.vocab_embedding.weight": part.contiguous()}
        edit_rank(trt, rank, lambda tensors, name=name: tensors.update(name))
    edit_config(trt, use_parallel_embedding=True, embedding_sharding_dim=dim)
    assert torch.equal(open_checkpoint(trt).load("embed_tokens.weight"), embedding)


def test_tied_checkpoint_stays_tied_with_or_without_its_head(written):
    _, trt = written(tie_word_embeddings=True)
    assert open_checkpoint(trt).config.tie_word_embeddings
    edit_rank(trt, 0, lambda tensors: tensors.pop("lm_head.weight"))
    assert open_checkpoint(trt).config.tie_word_embeddings


def test_missing_and_unknown_tensors_are_named(written):
    _, trt = written()

    def spoil(tensors):
        tensors["transformer.layers.0.mlp.per_channel_scale"] = torch.zeros(3)
        del tensors["transformer.ln_f.weight"]

    edit_rank(trt, 0, spoil)
    with pytest.raises(CheckpointError) as refusal:
        open_checkpoint(trt)
    assert "transformer.ln_f.weight [48]" in str(refusal.value)
    assert "per_channel_scale [3]" in str(refusal.value)


def test_missing_rank_is_named(written):
    _, trt = written(tp=2)
    (trt / "rank1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"rank1\.safetensors"):
        open_checkpoint(trt)


def test_pipeline_parallel_checkpoint_is_refused_by_name(written):
    _, trt = written()
    edit_config(trt, mapping={"world_size": 2, "tp_size": 1, "pp_size": 2})
    with pytest.raises(CheckpointError, match="pp_size 2"):
        open_checkpoint(trt)


@pytest.mark.parametrize(("tp", "words"), [(3, "num_heads 4"), (0, "tp 0"), (8, "num_heads 4")])
def test_ranks_that_do_not_divide_the_model_are_refused(written, tp, words):
    with pytest.raises(CheckpointError, match=words):
        written(tp=tp)


def test_existing_folder_is_never_overwritten(written, tmp_path):
    (tmp_path / "trt").mkdir()
    (tmp_path / "trt" / "precious").write_text("x")
    with pytest.raises(ConfigError, match="never overwritten"):
        written()
    assert (tmp_path / "trt" / "precious").read_text() == "x"
