import numpy as np
import pytest
from transformers import AutoTokenizer

from mfs_trt.checkpoint import open_checkpoint
from mfs_trt.checkpoint.gguf_config_writer import gguf_fields
from mfs_trt.checkpoint.gguf_file import GgufFile
from mfs_trt.checkpoint.gguf_tokenizer import write_gguf_tokenizer
from mfs_trt.checkpoint.gguf_tokenizer_writer import tokenizer_fields
from mfs_trt.checkpoint.gguf_writer import write_gguf_checkpoint
from mfs_trt.errors import CheckpointError, ConfigError
from mfs_trt.model.rope import inverse_frequencies
from mfs_trt.model_config import RopeConfig
from mfs_trt.weights.store import WeightStore
from mfs_trt.weights.tier import TierCheckpoint
from tiny import tiny_config
from tiny_folders import folder_family, write_tiny_family
from tiny_tokenizers import build_tokenizer

TEXTS = ["Hello world, 1234", " leading", "two  spaces\n\n\tand don't", "Grüße 日本 😀", ""]


@pytest.fixture
def store(tmp_path):
    family = folder_family((1, 2), vocab_size=512)
    return WeightStore(write_tiny_family(tmp_path / "family", family))


def sentencepiece_folder(folder):
    """A LLaMA-2-like tokenizer: merges ranked by the token that they make."""
    pieces = ["▁", "h", "e", "l", "o", "he", "ll", "hell", "hello", "▁hello", "x"]
    byte_tokens = [f"<0x{value:02X}>" for value in range(256)]
    ranks = {"he": -1.0, "ll": -2.0, "hell": -3.0, "hello": -4.0, "▁hello": -5.0}
    tokens = ["<unk>", "<s>", "</s>", *byte_tokens, *pieces]
    fields = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [ranks.get(token, -100.0) for token in tokens],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    folder.mkdir()
    write_gguf_tokenizer(fields, folder)
    return folder


def reread(folder, fields):
    folder.mkdir()
    write_gguf_tokenizer(fields, folder)
    return AutoTokenizer.from_pretrained(folder)


def test_byte_level_tokenizer_cuts_the_same_when_read_back(tmp_path):
    build_tokenizer("byte_level", tmp_path / "t")
    fields = tokenizer_fields(tmp_path / "t", 512)
    ours, theirs = AutoTokenizer.from_pretrained(tmp_path / "t"), reread(tmp_path / "b", fields)
    for text in (*TEXTS, "<|im_start|>user [grüß dich]<|im_end|>"):
        assert theirs.encode(text) == ours.encode(text)
    assert theirs.chat_template == ours.chat_template
    assert fields["tokenizer.ggml.pre"] == "gpt-2"


def test_sentencepiece_tokenizer_cuts_the_same_when_read_back(tmp_path):
    folder = sentencepiece_folder(tmp_path / "t")
    fields = tokenizer_fields(folder, 300)
    ours, theirs = AutoTokenizer.from_pretrained(folder), reread(tmp_path / "b", fields)
    for text in (*TEXTS, "hello hello xhell", "hhellellox"):
        assert theirs.encode(text) == ours.encode(text)
    assert theirs.encode("x")[0] == 1  # the begin token
    types = fields["tokenizer.ggml.token_type"]
    assert types[:4] == [2, 3, 3, 6]


def test_vocabulary_is_padded_with_unused_tokens_to_the_models(tmp_path):
    build_tokenizer("byte_level", tmp_path / "t")
    fields = tokenizer_fields(tmp_path / "t", 512)
    assert len(fields["tokenizer.ggml.tokens"]) == 512
    assert fields["tokenizer.ggml.tokens"][511] == "[PAD511]"
    assert fields["tokenizer.ggml.token_type"][511] == 5


@pytest.mark.parametrize(
    ("kind", "vocab_size", "words"),
    [
        ("metaspace_unigram", 512, "Unigram"),
        ("metaspace_byte_fallback", 512, "not ranked"),
        ("byte_level", 100, "ids below 100"),
    ],
)
def test_tokenizer_that_gguf_cannot_express_is_refused(tmp_path, kind, vocab_size, words):
    build_tokenizer(kind, tmp_path / "t")
    with pytest.raises(CheckpointError, match=f"{words}.*--no-tokenizer"):
        tokenizer_fields(tmp_path / "t", vocab_size)


def test_file_holds_the_tokenizer_and_every_end_token(tmp_path, store):
    ours = build_tokenizer("byte_level", store.folder)
    reader = TierCheckpoint(store, "t0")
    reader.end_token_ids = (2, 5, 9)
    write_gguf_checkpoint(reader, tmp_path / "m.gguf")
    found = open_checkpoint(tmp_path / "m.gguf")
    assert found.end_token_ids == (2, 5, 9)
    (tmp_path / "t").mkdir()
    assert found.write_tokenizer(tmp_path / "t")
    read = AutoTokenizer.from_pretrained(tmp_path / "t")
    assert read.encode("Hello world") == ours.encode("Hello world")


def test_file_without_tokenizer_says_so_when_read(tmp_path, store):
    build_tokenizer("metaspace_unigram", store.folder)
    write_gguf_checkpoint(TierCheckpoint(store, "t0"), tmp_path / "m.gguf", with_tokenizer=False)
    assert not open_checkpoint(tmp_path / "m.gguf").write_tokenizer(tmp_path)


def test_vectors_are_float32_whatever_the_matrices_are(tmp_path, store):
    write_gguf_checkpoint(TierCheckpoint(store, "t0", "float16"), tmp_path / "m.gguf")
    tensors = GgufFile(tmp_path / "m.gguf").tensors
    assert tensors["blk.0.attn_norm.weight"].type_name == "F32"
    assert tensors["blk.0.attn_q.weight"].type_name == "F16"


@pytest.mark.parametrize(
    "rope",
    [
        RopeConfig(1e4, "yarn", {"factor": 4.0, "original_max_position_embeddings": 64}),
        RopeConfig(
            1e4,
            "yarn",
            {"factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 1.3},
        ),
        RopeConfig(
            1e4,
            "longrope",
            {
                "short_factor": [1.0, 2.0, 3.0],
                "long_factor": [1.0, 2.0, 3.0],
                "original_max_position_embeddings": 64,
            },
        ),
        RopeConfig(
            5e5,
            "llama3",
            {
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        ),
    ],
    ids=lambda rope: f"{rope.scaling_type}-{len(rope.scaling)}",
)
def test_scaled_rope_turns_by_the_same_angles_when_read_back(rope):
    from mfs_trt.checkpoint.gguf_config import config_from_gguf
    from mfs_trt.checkpoint.names import gguf_stored_name
    from mfs_trt.tensor_names import tensor_shapes

    config = tiny_config(rope=rope)
    fields, factors = gguf_fields(config)
    shapes = {gguf_stored_name(name): shape for name, shape in tensor_shapes(config).items()}
    read = config_from_gguf({"general.architecture": "llama", **fields}, shapes, factors)
    ours, theirs = inverse_frequencies(config), inverse_frequencies(read)
    np.testing.assert_allclose(theirs[0], ours[0], rtol=1e-6)
    assert theirs[1] == pytest.approx(ours[1], rel=1e-6)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"rope": RopeConfig(1e4, "dynamic", {"factor": 2.0})}, "dynamic"),
        ({"qk_norm": True}, "qk_norm"),
        ({"sliding_window": 4, "windowed_layers": (1,)}, "windowed_layers"),
    ],
)
def test_model_that_gguf_cannot_express_is_refused_by_name(overrides, words):
    with pytest.raises(CheckpointError, match=words):
        gguf_fields(tiny_config(**overrides))


def test_file_is_replaced_only_by_force_and_a_folder_never(tmp_path, store):
    path = tmp_path / "m.gguf"
    write_gguf_checkpoint(TierCheckpoint(store, "t0"), path)
    with pytest.raises(ConfigError, match="--force"):
        write_gguf_checkpoint(TierCheckpoint(store, "t1"), path)
    write_gguf_checkpoint(TierCheckpoint(store, "t1"), path, force=True)
    assert open_checkpoint(path).config.num_layers == 2
    with pytest.raises(ConfigError, match="not a file"):
        write_gguf_checkpoint(TierCheckpoint(store, "t0"), store.folder, force=True)


def test_failure_midway_leaves_nothing(tmp_path, store):
    reader = TierCheckpoint(store, "t0")

    def fail(name):
        raise OSError("disk")

    reader.load = fail
    with pytest.raises(OSError, match="disk"):
        write_gguf_checkpoint(reader, tmp_path / "out" / "m.gguf")
    assert list((tmp_path / "out").iterdir()) == []
