"""Laws of streamed text, against an oracle that decodes everything each time and searches."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mfs_trt.sampling_params import SamplingParams
from mfs_trt.serving.text_stream import TextStream
from mfs_trt.tokenizer import IncrementalDecoder, Tokenizer
from tiny_tokenizers import KINDS, build_tokenizer

BROKEN = "\ufffd"
TEXTS = st.text(
    alphabet=st.one_of(st.sampled_from("aeno st\n  你好世界é😀👍🏽"), st.characters(codec="utf-8")),
    max_size=40,
)
BURST_SIZES = st.lists(st.integers(1, 8), min_size=60, max_size=60)
STOP_WORDS = st.lists(
    st.text(alphabet="aeno st\n你好é😀", min_size=1, max_size=4), min_size=1, max_size=5
)


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request, tmp_path_factory) -> Tokenizer:
    return build_tokenizer(request.param, tmp_path_factory.mktemp("tokenizer"))


def split(token_ids: list[int], burst_sizes: list[int]) -> list[list[int]]:
    bursts = []
    sizes = iter(burst_sizes)
    while token_ids:
        size = next(sizes, 1)
        bursts.append(token_ids[:size])
        token_ids = token_ids[size:]
    return bursts


def settled(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    """The decode of valid text so far, without the character that is still incomplete."""
    return tokenizer.decode(token_ids).rstrip(BROKEN)


def stop_oracle(
    tokenizer: Tokenizer, token_ids: list[int], words: list[str], min_tokens: int
) -> tuple[str, int] | None:
    """Text and number of tokens at the first token that completes a stop word; None: no stop."""
    known_before = len(settled(tokenizer, token_ids[: max(0, min_tokens - 1)]))
    for num_tokens in range(max(1, min_tokens), len(token_ids) + 1):
        text = settled(tokenizer, token_ids[:num_tokens])
        starts = [
            start
            for word in words
            for start in range(len(text))
            if text.startswith(word, start) and start + len(word) > known_before
        ]
        if starts:
            return text[: min(starts)], num_tokens
    return None


def assert_concatenates(tokenizer, token_ids, burst_sizes, skip_special_tokens=True):
    decoder = IncrementalDecoder(tokenizer, skip_special_tokens)
    chunks = [decoder.push(burst) for burst in split(token_ids, burst_sizes)]
    chunks.append(decoder.flush())
    expected = tokenizer.decode(token_ids, skip_special_tokens)
    assert "".join(chunks) == expected
    if BROKEN not in expected:
        assert not any(BROKEN in chunk for chunk in chunks)


@settings(max_examples=150, deadline=None)
@given(text=TEXTS, burst_sizes=BURST_SIZES)
def test_chunks_of_a_text_concatenate_to_its_decode(tokenizer, text, burst_sizes):
    assert_concatenates(tokenizer, tokenizer.encode(text), burst_sizes)


@settings(max_examples=300, deadline=None)
@given(data=st.data(), skip=st.booleans(), burst_sizes=BURST_SIZES)
def test_chunks_of_any_token_ids_concatenate_to_their_decode(tokenizer, data, skip, burst_sizes):
    # Ids past the vocabulary too: a model's logits may be padded.
    ids = st.integers(0, tokenizer.vocab_size + 2)
    bytes_too = sorted(tokenizer.byte_fallback_ids)
    if bytes_too:
        ids = st.one_of(ids, st.sampled_from(bytes_too))
    token_ids = data.draw(st.lists(ids, max_size=40))
    assert_concatenates(tokenizer, token_ids, burst_sizes, skip)


@settings(max_examples=300, deadline=None)
@given(text=TEXTS, words=STOP_WORDS, min_tokens=st.integers(0, 12), burst_sizes=BURST_SIZES)
def test_stream_stops_where_searching_the_whole_decode_finds_a_stop_word(
    tokenizer, text, words, min_tokens, burst_sizes
):
    token_ids = tokenizer.encode(text.replace(BROKEN, ""))
    expected = stop_oracle(tokenizer, token_ids, words, min_tokens)
    stream = TextStream(tokenizer, SamplingParams(min_tokens=min_tokens, stop=tuple(words)), ())
    streamed, num_used, is_stopped = "", 0, False
    for burst in split(token_ids, burst_sizes):
        delta, is_stopped = stream.push(burst, ends=False)
        streamed += delta
        num_used += stream.num_tokens_used
        if is_stopped:
            break
    streamed += stream.finish()
    if expected is None:
        assert not is_stopped
        assert streamed == tokenizer.decode(token_ids)
    else:
        assert is_stopped
        assert (streamed, num_used) == expected


@settings(max_examples=150, deadline=None)
@given(text=TEXTS, words=STOP_WORDS)
def test_text_held_back_is_a_beginning_of_a_stop_word_or_unsettled(tokenizer, text, words):
    stream = TextStream(tokenizer, SamplingParams(), words)
    decoder = IncrementalDecoder(tokenizer)
    streamed = decoded = ""
    for token_id in tokenizer.encode(text):
        delta, is_stopped = stream.push([token_id], ends=False)
        streamed += delta
        decoded += decoder.push([token_id])
        if is_stopped:
            break
        assert decoded.startswith(streamed)
        held = decoded[len(streamed) :]
        assert any(word.startswith(held) and word != held for word in words)
