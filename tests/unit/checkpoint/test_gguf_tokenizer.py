from io import BytesIO

import pytest
import sentencepiece as sentencepiece_library
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

from mfs_trt.checkpoint.gguf_tokenizer import build_gguf_tokenizer, write_gguf_tokenizer
from mfs_trt.errors import CheckpointError

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = ["H e", "l l", "He ll", "Hell o", "1 2", "3 4", "Ġ w"]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXTS = ["Hello 1234", " leading", "don't  stop\n\n\tnow", "日本語 😀 naïve", "👩‍👩‍👧 ²³", ""]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"


def byte_level(**more):
    tokens = [*SPECIAL, "<think>", *ALPHABET, *(merge.replace(" ", "") for merge in MERGES)]
    types = [3] * len(SPECIAL) + [4] + [1] * (len(tokens) - len(SPECIAL) - 1)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": TEMPLATE,
        **more,
    }


def sentencepiece(**more):
    pieces = ["▁", "h", "e", "l", "o", "he", "ll", "hell", "hello", "▁hello", "x"]
    byte_tokens = [f"<0x{value:02X}>" for value in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *byte_tokens, *pieces]
    ranks = {"he": -1.0, "ll": -2.0, "hell": -3.0, "hello": -4.0, "▁hello": -5.0}
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [ranks.get(token, -100.0) for token in tokens],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **more,
    }


@pytest.fixture
def loaded(tmp_path):
    assert write_gguf_tokenizer(byte_level(), tmp_path)
    return AutoTokenizer.from_pretrained(tmp_path)


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back_as_it_was(loaded, text):
    assert loaded.decode(loaded.encode(text)) == text


def test_smollm_digits_stand_alone(loaded):
    assert loaded.convert_ids_to_tokens(loaded.encode("1234")) == ["1", "2", "3", "4"]


def test_gpt2_digits_merge():
    tokenizer = build_gguf_tokenizer(byte_level(**{"tokenizer.ggml.pre": "gpt-2"}))
    assert tokenizer.encode("1234").tokens == ["12", "34"]


def test_llama3_digits_come_in_threes():
    tokenizer = build_gguf_tokenizer(byte_level(**{"tokenizer.ggml.pre": "llama-bpe"}))
    assert tokenizer.encode("1234", add_special_tokens=False).tokens == ["12", "3", "4"]


def test_special_tokens_are_one_token_inside_text(loaded):
    ids = loaded.encode("Hello<|im_end|>")
    assert ids[-1] == 2
    assert loaded.decode(ids, skip_special_tokens=True) == "Hello"


def test_user_defined_tokens_are_whole_but_not_special(loaded):
    ids = loaded.encode("<think>")
    assert ids == [3]
    assert loaded.decode(ids, skip_special_tokens=True) == "<think>"


def test_end_token_and_chat_template_are_kept(loaded):
    assert (loaded.eos_token, loaded.eos_token_id, loaded.bos_token_id) == ("<|im_end|>", 2, 1)
    text = loaded.apply_chat_template([{"role": "user", "content": "Hello"}], tokenize=False)
    assert text == "<|im_start|>Hello<|im_end|>"


def test_no_beginning_token_is_added_unless_the_file_says_so(loaded):
    assert loaded.encode("Hello")[0] != 1
    fields = byte_level(**{"tokenizer.ggml.add_bos_token": True})
    assert build_gguf_tokenizer(fields).encode("Hello").ids[0] == 1


def test_llama3_adds_its_beginning_token_by_default():
    tokenizer = build_gguf_tokenizer(byte_level(**{"tokenizer.ggml.pre": "llama-bpe"}))
    assert tokenizer.encode("Hello").ids[0] == 1


def test_sentencepiece_merges_by_score_and_adds_bos():
    tokenizer = build_gguf_tokenizer(sentencepiece())
    assert tokenizer.encode("hello").tokens == ["<s>", "▁hello"]


@pytest.mark.parametrize("text", ["hello hello", "x  x", "日本 😀"])
def test_sentencepiece_text_comes_back_as_it_was(text):
    tokenizer = build_gguf_tokenizer(sentencepiece())
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


@pytest.fixture(scope="module")
def trained():
    """A sentencepiece model as LLaMA's are: byte fallback, no normalisation, a dummy prefix."""
    lines = [
        "hello world how are you",
        "the quick brown fox 日本語",
        "naïve text 1234 for training",
    ]
    model = BytesIO()
    sentencepiece_library.SentencePieceTrainer.train(
        sentence_iterator=iter(lines * 50),
        model_writer=model,
        vocab_size=360,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        split_digits=True,
        minloglevel=2,
    )
    return sentencepiece_library.SentencePieceProcessor(model_proto=model.getvalue())


def test_sentencepiece_vocabulary_gives_the_ids_of_the_sentencepiece_library(trained):
    ids = range(trained.vocab_size())
    kinds = {trained.is_unknown: 2, trained.is_control: 3, trained.is_byte: 6}
    fields = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [trained.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [trained.get_score(i) for i in ids],
        "tokenizer.ggml.token_type": [
            next((kind for test, kind in kinds.items() if test(i)), 1) for i in ids
        ],
        "tokenizer.ggml.bos_token_id": 1,
    }
    tokenizer = build_gguf_tokenizer(fields)
    for text in ("hello world", "  two  spaces", "日本語 😀 naïve", "quick foxes 1234\nnew", "x"):
        assert tokenizer.encode(text).ids == [1, *trained.encode(text)], text


def test_file_without_vocabulary_says_so(tmp_path):
    assert write_gguf_tokenizer({}, tmp_path) is False


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (byte_level(**{"tokenizer.ggml.pre": "future-bpe"}), ("tokenizer.ggml.pre", "future-bpe")),
        (byte_level(**{"tokenizer.ggml.model": "rwkv"}), ("tokenizer.ggml.model", "rwkv")),
    ],
)
def test_unknown_tokenizers_are_refused_by_name(fields, words):
    with pytest.raises(CheckpointError) as refusal:
        build_gguf_tokenizer(fields)
    for word in words:
        assert word in str(refusal.value)
