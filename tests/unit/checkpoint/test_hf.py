import json

import pytest
import safetensors.torch
import torch
import transformers
from tokenizers import Tokenizer, models
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.pre_tokenizers import ByteLevel

from mfs_trt.checkpoint import open_checkpoint
from mfs_trt.checkpoint.hf import HfCheckpoint
from mfs_trt.errors import CheckpointError


def edit_weights(folder, change):
    path = folder / "model.safetensors"
    tensors = dict(safetensors.torch.load_file(path))
    change(tensors)
    safetensors.torch.save_file(tensors, path)


def edit_config(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_shards_with_an_index_are_one_checkpoint(hf_folder, tmp_path):
    whole = hf_folder("llama")
    model = transformers.AutoModelForCausalLM.from_pretrained(whole)
    model.save_pretrained(tmp_path / "shards", max_shard_size="100KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    a, b = HfCheckpoint(whole), HfCheckpoint(tmp_path / "shards")
    name = "layers.5.mlp.down_proj.weight"
    assert torch.equal(a.load(name), b.load(name))


def test_missing_shard_is_refused_by_name(hf_folder, tmp_path):
    model = transformers.AutoModelForCausalLM.from_pretrained(hf_folder("llama"))
    model.save_pretrained(tmp_path / "shards", max_shard_size="100KB")
    gone = sorted((tmp_path / "shards").glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(CheckpointError, match=gone.name):
        HfCheckpoint(tmp_path / "shards")


def test_index_cannot_point_outside_the_folder(hf_folder):
    folder = hf_folder("llama")
    index = {"weight_map": {"model.norm.weight": "../x.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"\.\./x"):
        HfCheckpoint(folder)


def test_several_files_without_an_index_are_refused(hf_folder):
    folder = hf_folder("llama")
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    (folder / "b.safetensors").write_bytes((folder / "a.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match=r"a\.safetensors, b\.safetensors"):
        HfCheckpoint(folder)


def test_pickled_weights_are_refused(hf_folder):
    folder = hf_folder("llama")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pickled \.bin"):
        HfCheckpoint(folder)


def test_missing_tensor_is_named_with_its_shape(hf_folder):
    folder = hf_folder("llama")
    edit_weights(folder, lambda tensors: tensors.pop("model.layers.2.mlp.up_proj.weight"))
    with pytest.raises(CheckpointError, match=r"missing.*layers\.2\.mlp\.up_proj.*\[80, 48\]"):
        HfCheckpoint(folder)


def test_unknown_tensor_is_named(hf_folder):
    folder = hf_folder("llama")
    edit_weights(folder, lambda tensors: tensors.update({"model.extra.weight": torch.zeros(3)}))
    with pytest.raises(CheckpointError, match=r"unknown tensors: extra\.weight \[3\]"):
        HfCheckpoint(folder)


def test_wrong_shape_is_named_with_both_shapes(hf_folder):
    folder = hf_folder("llama")
    edit_config(folder, intermediate_size=81)
    with pytest.raises(CheckpointError, match=r"expected \[81, 48\], got \[80, 48\]"):
        HfCheckpoint(folder)


def test_frequency_buffers_of_old_checkpoints_are_skipped(hf_folder):
    folder = hf_folder("llama")
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(6)}
    edit_weights(folder, lambda tensors: tensors.update(buffer))
    assert HfCheckpoint(folder).config.num_layers == 6


def test_tied_checkpoint_that_carries_the_head_stays_tied(hf_folder):
    folder = hf_folder("llama", tie_word_embeddings=True)

    def carry(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    edit_weights(folder, carry)
    assert HfCheckpoint(folder).config.tie_word_embeddings


def test_tied_checkpoint_with_another_head_is_not_tied(hf_folder):
    folder = hf_folder("llama", tie_word_embeddings=True)

    def carry(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1

    edit_weights(folder, carry)
    reader = HfCheckpoint(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert not reader.config.tie_word_embeddings
    assert torch.equal(reader.load("lm_head.weight"), model.lm_head.weight)


def test_tied_checkpoint_with_the_head_alone_uses_it_for_both(hf_folder):
    folder = hf_folder("llama", tie_word_embeddings=True)

    def rename(tensors):
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")

    edit_weights(folder, rename)
    reader = HfCheckpoint(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert reader.config.tie_word_embeddings
    assert torch.equal(reader.load("embed_tokens.weight"), model.model.embed_tokens.weight)


def test_untied_checkpoint_without_a_head_is_refused(hf_folder):
    folder = hf_folder("llama")
    edit_weights(folder, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"missing.*lm_head\.weight \[199, 48\]"):
        HfCheckpoint(folder)


def test_dtype_is_the_one_that_all_tensors_have(hf_folder):
    folder = hf_folder("llama")

    def narrow(tensors):
        tensors.update({name: t.bfloat16() for name, t in tensors.items()})

    edit_weights(folder, narrow)  # config.json still says float32
    assert HfCheckpoint(folder).dtype == "bfloat16"


def test_mixed_dtypes_become_the_one_of_the_config(hf_folder):
    folder = hf_folder("llama")
    edit_config(folder, dtype="bfloat16")
    norm = "model.norm.weight"
    edit_weights(folder, lambda tensors: tensors.update({norm: tensors[norm].bfloat16()}))
    assert HfCheckpoint(folder).dtype == "bfloat16"


def test_integer_weights_are_refused_by_name(hf_folder):
    folder = hf_folder("llama")
    norm = "model.norm.weight"
    edit_weights(folder, lambda tensors: tensors.update({norm: tensors[norm].to(torch.int8)}))
    with pytest.raises(CheckpointError, match=r"norm\.weight.*int8"):
        HfCheckpoint(folder)


def test_end_tokens_come_from_the_generation_config_first(hf_folder):
    folder = hf_folder("llama")
    edit_config(folder, eos_token_id=2)
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 5, 7]}')
    assert HfCheckpoint(folder).end_token_ids == (5, 7)


def test_end_tokens_fall_back_to_the_config(hf_folder):
    folder = hf_folder("llama")
    edit_config(folder, eos_token_id=9)
    (folder / "generation_config.json").unlink()
    assert HfCheckpoint(folder).end_token_ids == (9,)


def test_folder_without_tokenizer_says_so(hf_folder, tmp_path):
    assert HfCheckpoint(hf_folder("llama")).write_tokenizer(tmp_path) is False


@pytest.mark.parametrize("content", ["{", "[]"])
def test_broken_config_is_refused_by_name(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        open_checkpoint(tmp_path)


def test_path_that_does_not_exist_is_refused_by_name(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere"):
        open_checkpoint(tmp_path / "nowhere")


def byte_level_vocabulary():
    alphabet = sorted(ByteLevel.alphabet())
    return {token: i for i, token in enumerate(["<|endoftext|>", *alphabet, "He"])}


def test_tokenizer_files_are_copied_and_load(hf_folder, tmp_path):
    folder = hf_folder("qwen2")
    backend = Tokenizer(models.BPE(byte_level_vocabulary(), [("H", "e")]))
    backend.pre_tokenizer, backend.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    original = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|endoftext|>", chat_template="{{ messages }}"
    )
    original.save_pretrained(folder)
    assert HfCheckpoint(folder).write_tokenizer(tmp_path)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.encode("He 日本 😀") == original.encode("He 日本 😀")
    assert (loaded.eos_token_id, loaded.chat_template) == (0, "{{ messages }}")


def test_vocabulary_without_tokenizer_json_is_turned_into_one(hf_folder, tmp_path):
    folder = hf_folder("qwen2")
    (folder / "vocab.json").write_text(json.dumps(byte_level_vocabulary()))
    (folder / "merges.txt").write_text("#version: 0.2\nH e\n")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
    assert HfCheckpoint(folder).write_tokenizer(tmp_path)
    assert (tmp_path / "tokenizer.json").is_file()
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.decode(loaded.encode("He 日本 😀")) == "He 日本 😀"
    assert loaded.convert_ids_to_tokens(loaded.encode("He")) == ["He"]


def test_vocabulary_that_nothing_can_read_is_refused_by_folder(hf_folder, tmp_path):
    folder = hf_folder("llama")
    (folder / "tokenizer.model").write_bytes(b"not a model")
    with pytest.raises(CheckpointError, match=r"hf-llama.*expected tokenizer\.json"):
        HfCheckpoint(folder).write_tokenizer(tmp_path)
