"""Tokenizer: encode, decode, chat template, words; IncrementalDecoder: deltas that never break."""

import pytest

from mfs_trt.errors import FamilyError, InvalidRequestError
from mfs_trt.tokenizer import IncrementalDecoder, Tokenizer
from tiny_tokenizers import ADDED, END, KINDS, build_tokenizer

BROKEN = "\ufffd"
SENTENCE = "Hello world, how are you?  Two  spaces, one two three."


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request, tmp_path_factory) -> Tokenizer:
    return build_tokenizer(request.param, tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory) -> Tokenizer:
    return build_tokenizer("byte_level", tmp_path_factory.mktemp("byte_level"))


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory) -> Tokenizer:
    return build_tokenizer("metaspace_byte_fallback", tmp_path_factory.mktemp("byte_fallback"))


def bursts(token_ids: list[int], size: int) -> list[list[int]]:
    return [token_ids[i : i + size] for i in range(0, len(token_ids), size)]


def chunks_of(tokenizer: Tokenizer, token_ids: list[int], size: int) -> list[str]:
    decoder = IncrementalDecoder(tokenizer)
    return [*(decoder.push(burst) for burst in bursts(token_ids, size)), decoder.flush()]


def test_row_1_streamed_text_keeps_its_spaces(tokenizer):
    chunks = chunks_of(tokenizer, tokenizer.encode(SENTENCE), size=1)
    assert "".join(chunks) == tokenizer.decode(tokenizer.encode(SENTENCE))
    assert "".join(chunks).count(" ") == SENTENCE.count(" ")
    assert sum(1 for chunk in chunks if chunk) > 5  # it streams, rather than holding all to the end


@pytest.mark.parametrize("text", ["龍鬱驚。", "👩‍👩‍👧‍👦 fine 👍🏽", "Łódź, señor ☕"])
def test_row_2_characters_split_across_tokens_are_never_broken(byte_level, byte_fallback, text):
    for tokenizer in (byte_level, byte_fallback):
        token_ids = tokenizer.encode(text)
        assert (
            "" in chunks_of(tokenizer, token_ids, size=1)[:-1]
        )  # a character takes several tokens
        for size in range(1, 9):
            chunks = chunks_of(tokenizer, token_ids, size)
            assert "".join(chunks) == text
            assert not any(BROKEN in chunk for chunk in chunks)


def test_row_2_bytes_held_for_a_character_are_flushed_at_the_end(byte_level, byte_fallback):
    for tokenizer in (byte_level, byte_fallback):
        token_ids = tokenizer.encode("a 😀")[:-1]
        decoder = IncrementalDecoder(tokenizer)
        pushed = "".join(decoder.push([token_id]) for token_id in token_ids)
        assert BROKEN not in pushed
        flushed = decoder.flush()
        assert BROKEN in flushed
        assert pushed + flushed == tokenizer.decode(token_ids)


def test_character_is_returned_with_the_token_that_completes_it(byte_level):
    *first, last = byte_level.encode("😀")
    decoder = IncrementalDecoder(byte_level)
    assert [decoder.push([token_id]) for token_id in first] == [""] * len(first)
    assert decoder.push([last]) == "😀"


def test_one_bad_byte_spoils_a_run_of_byte_tokens_before_any_of_it_is_returned(byte_fallback):
    newline, half = byte_fallback.encode_words(["\n", "é"])[0][0], byte_fallback.encode("é")[-2]
    decoder = IncrementalDecoder(byte_fallback)
    assert decoder.push([newline]) == ""
    assert decoder.peek() == "\n"
    assert decoder.push([half]) == ""
    assert decoder.flush() == BROKEN * 2 == byte_fallback.decode([newline, half])


@pytest.mark.parametrize("size", range(1, 9))
def test_row_3_bursts_of_accepted_tokens_lose_no_space_at_chunk_borders(tokenizer, size):
    token_ids = tokenizer.encode(SENTENCE)
    assert "".join(chunks_of(tokenizer, token_ids, size)) == tokenizer.decode(token_ids)


def test_row_4_chunks_are_disjoint_deltas(tokenizer):
    token_ids = tokenizer.encode("one two three " * 20)
    decoder = IncrementalDecoder(tokenizer)
    num_characters = sum(len(decoder.push([token_id])) for token_id in token_ids)
    assert num_characters + len(decoder.flush()) == len(tokenizer.decode(token_ids))


def test_cost_of_a_push_does_not_grow_with_the_text(tokenizer, monkeypatch):
    decoded_sizes = []
    decode = tokenizer.decode

    def counting_decode(token_ids, skip_special_tokens=True):
        decoded_sizes.append(len(token_ids))
        return decode(token_ids, skip_special_tokens)

    token_ids = tokenizer.encode(SENTENCE * 20)
    space = tokenizer.encode("a  ")[-1]
    decoder = IncrementalDecoder(tokenizer)
    monkeypatch.setattr(tokenizer, "decode", counting_decode)
    for burst in bursts(token_ids + [space] * 200, 4):
        decoder.push(burst)
    assert max(decoded_sizes, default=0) <= 16


def test_special_tokens_have_no_text_unless_asked_for(tokenizer):
    token_ids = [*tokenizer.encode("one"), tokenizer.special_tokens[END], *tokenizer.encode("two")]
    shown = IncrementalDecoder(tokenizer, skip_special_tokens=False)
    assert END in shown.push(token_ids) + shown.flush()
    hidden = IncrementalDecoder(tokenizer)
    assert END not in hidden.push(token_ids) + hidden.flush()


def test_added_token_streams_as_it_reads(tokenizer):
    token_ids = tokenizer.encode(f"one {ADDED} two")
    assert any(tokenizer.piece(token_id) == ADDED for token_id in token_ids)
    text = "".join(chunks_of(tokenizer, token_ids, size=1))
    assert ADDED in text
    assert text == tokenizer.decode(token_ids)


def test_piece_without_text_costs_no_space_after_it(byte_fallback):
    """One leading space is stripped from the whole text, not again from each window."""
    empty = next(i for i in range(byte_fallback.vocab_size) if byte_fallback.piece(i) == "")
    token_ids = [*byte_fallback.encode("one"), empty, *byte_fallback.encode("two")]
    assert "".join(chunks_of(byte_fallback, token_ids, size=1)) == "one two"


def test_encode_and_decode_are_inverse(tokenizer):
    assert tokenizer.decode(tokenizer.encode("Hello world, you")) == "Hello world, you"


def test_end_token_and_vocabulary_size_are_the_tokenizers(tokenizer):
    assert tokenizer.end_token_ids == (tokenizer.special_tokens[END],)
    assert tokenizer.piece(tokenizer.vocab_size - 1) is not None
    assert tokenizer.piece(tokenizer.vocab_size) is None


def test_words_are_encoded_with_and_without_a_leading_space(tokenizer):
    before = tokenizer.encode("a")
    spellings = tokenizer.encode_words(["two"])
    assert [tokenizer.decode([*before, *ids]) for ids in spellings] == ["atwo", "a two"]
    sentence = tokenizer.encode("one two, (two)")
    for ids in spellings:
        assert any(tuple(sentence[i : i + len(ids)]) == ids for i in range(len(sentence)))


def test_words_are_encoded_without_special_tokens(tokenizer):
    for ids in tokenizer.encode_words(["two", "three"]):
        assert not tokenizer.special_token_ids & set(ids)


@pytest.mark.parametrize("text", [SENTENCE, "Hello\n\nworld ", "é 好 b", f"fine.{END}\nand"])
def test_tokens_end_where_the_text_of_those_so_far_ends(byte_level, text):
    token_ids, ends = byte_level.encode_with_ends(text)
    assert token_ids == byte_level.encode(text, add_special_tokens=False)
    for count, end in enumerate(ends, start=1):
        if count == len(ends) or ends[count] > end:  # the character is whole
            so_far = byte_level.decode(token_ids[:count], skip_special_tokens=False)
            assert so_far == text[:end]


def test_chat_template_ends_where_the_answer_begins(byte_level):
    token_ids = byte_level.apply_chat_template([{"role": "user", "content": "Hello"}])
    text = byte_level.decode(token_ids, skip_special_tokens=False)
    assert text == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert token_ids[0] == byte_level.special_tokens["<|im_start|>"]


def test_missing_chat_template_is_named(tmp_path):
    tokenizer = build_tokenizer("byte_level", tmp_path, chat_template=None)
    with pytest.raises(InvalidRequestError, match="no chat template") as error:
        tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}])
    assert str(tmp_path) in str(error.value)


def test_refusal_of_the_chat_template_is_an_invalid_request(tmp_path):
    template = "{{ raise_exception('only user turns') }}"
    tokenizer = build_tokenizer("byte_level", tmp_path, chat_template=template)
    with pytest.raises(InvalidRequestError, match="only user turns"):
        tokenizer.apply_chat_template([{"role": "tool", "content": "x"}])


@pytest.mark.parametrize("messages", [[], ["hi"], [{"role": "user"}], [{"content": "x"}]])
def test_malformed_messages_are_invalid_requests(byte_level, messages):
    with pytest.raises(InvalidRequestError, match="messages"):
        byte_level.apply_chat_template(messages)


@pytest.mark.parametrize("text", [b"bytes", None, "lone \ud800 surrogate"])
def test_what_is_not_a_text_is_an_invalid_request(byte_level, text):
    with pytest.raises(InvalidRequestError, match="text"):
        byte_level.encode(text)


def test_negative_token_id_is_an_invalid_request(byte_level):
    with pytest.raises(InvalidRequestError, match="-1"):
        byte_level.decode([5, -1])


def test_folder_without_tokenizer_is_named(tmp_path):
    with pytest.raises(FamilyError, match=str(tmp_path)):
        Tokenizer(tmp_path)


def test_missing_folder_is_not_looked_up_elsewhere():
    with pytest.raises(FamilyError, match="expected a folder, got gpt2"):
        Tokenizer("gpt2")
