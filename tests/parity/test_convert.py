"""Hugging Face ↔ family ↔ other formats: the same weights, bit for bit, whatever way they came."""

import os
from pathlib import Path

import pytest
import torch
import transformers
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from gguf_files import SIZES, write_gguf
from mfs_trt.checkpoint import open_checkpoint
from mfs_trt.checkpoint.trtllm import write_trtllm_checkpoint
from mfs_trt.family.tiers import parse_tiers
from mfs_trt.weights.convert import convert_checkpoint
from mfs_trt.weights.store import WeightStore
from mfs_trt.weights.tier import TierCheckpoint

MODELS = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
    ("mistral", {"sliding_window": 8}),
    ("mistral", {"num_key_value_heads": 1}),
    ("qwen2", {}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}),
    ("qwen3", {}),
    ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
]
IDS = [f"{name}-{'-'.join(options) or 'plain'}" for name, options in MODELS]


def convert(source, folder, tiers="3", **options) -> WeightStore:
    reader = open_checkpoint(source)
    convert_checkpoint(reader, parse_tiers(tiers, reader.config.num_layers), folder, **options)
    return WeightStore(folder)


@pytest.mark.parametrize(("architecture", "options"), MODELS, ids=IDS)
def test_family_holds_every_parameter_of_the_model(hf_folder, tmp_path, architecture, options):
    folder = hf_folder(architecture, **options)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    store = convert(folder, tmp_path / "family")
    parameters = {name.removeprefix("model."): p for name, p in model.named_parameters()}
    parameters["exits.6.norm.weight"] = parameters.pop("norm.weight")
    names = set(store.names()) - {"exits.2.norm.weight", "exits.4.norm.weight"}
    assert names == set(parameters)
    assert all(torch.equal(store.get(name), parameters[name]) for name in names)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(("architecture", "options"), MODELS, ids=IDS)
def test_way_through_tensorrt_llm_keeps_every_bit(hf_folder, tmp_path, architecture, options, tp):
    first = convert(hf_folder(architecture, **options), tmp_path / "first")
    write_trtllm_checkpoint(TierCheckpoint(first, "large"), tmp_path / "trt", tp)
    second = convert(tmp_path / "trt", tmp_path / "second")
    assert second.spec.model == first.spec.model
    assert set(second.names()) == set(first.names())
    assert all(torch.equal(first.get(name), second.get(name)) for name in first.names())
    assert second.spec.revision == first.spec.revision


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_way_through_tensorrt_llm_keeps_the_dtype(hf_folder, tmp_path, dtype):
    first = convert(hf_folder("qwen2"), tmp_path / "first", dtype=dtype)
    write_trtllm_checkpoint(TierCheckpoint(first, "large"), tmp_path / "trt", 2)
    assert convert(tmp_path / "trt", tmp_path / "second").spec.revision == first.spec.revision


@pytest.mark.parametrize("tied", [False, True])
def test_way_through_gguf_keeps_every_bit(hf_folder, tmp_path, tied):
    folder = hf_folder("llama", tie_word_embeddings=tied, **SIZES)
    first = convert(folder, tmp_path / "first")
    second = convert(write_gguf(tmp_path / "m.gguf", folder), tmp_path / "second")
    assert second.spec.model == first.spec.model
    assert second.spec.revision == first.spec.revision


def assert_equals_transformers(store: WeightStore, path: Path) -> None:
    """transformers dequantises and reorders a GGUF file by code of its own."""
    settings = load_gguf_checkpoint(path)["config"]
    config = transformers.LlamaConfig(**{k: v for k, v in settings.items() if k != "model_type"})
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    tensors = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    assert len(tensors) >= 9 * store.spec.model.num_layers + 2
    for name, tensor in tensors.items():
        name = name.removeprefix("model.")
        name = store.norm_name(-1) if name == "norm.weight" else name
        assert torch.equal(store.get(name), torch.as_tensor(tensor)), name


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_0", "Q4_1"])
def test_gguf_weights_equal_those_that_transformers_reads(hf_folder, tmp_path, kind):
    path = write_gguf(tmp_path / "m.gguf", hf_folder("llama", **SIZES), kind)
    assert_equals_transformers(convert(path, tmp_path / "family"), path)


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory) -> Path:
    """SmolLM2's GGUF file: the one that `SMOLLM2_GGUF` names, or else fetched."""
    if "SMOLLM2_GGUF" in os.environ:
        return Path(os.environ["SMOLLM2_GGUF"])
    from mfs_trt.cli.quickstart import fetch_gguf

    return fetch_gguf(tmp_path_factory.mktemp("smollm2"))


@pytest.mark.slow
def test_smollm2_equals_what_transformers_reads(smollm2, tmp_path):
    store = convert(smollm2, tmp_path / "family", tiers="10,20,30")
    assert_equals_transformers(store, smollm2)
    assert store.spec.end_token_ids == (2,)


@pytest.mark.slow
def test_smollm2_tokenizer_is_that_of_hugging_face(smollm2, tmp_path):
    open_checkpoint(smollm2).write_tokenizer(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("2024")) == ["2", "0", "2", "4"]
    for text in ("Hello 1234", " x", "don't\n\n\tstop", "日本語 😀", "👩‍👩‍👧 ²³ naïve"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("<|im_end|>") == [2]
    assert tokenizer.eos_token_id == 2
    messages = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
