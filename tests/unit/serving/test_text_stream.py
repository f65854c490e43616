"""TextStream: stop words on text, at the first occurrence, whatever tokens spell them."""

import pytest

from mfs_trt.sampling_params import SamplingParams
from mfs_trt.serving.text_stream import TextStream
from mfs_trt.tokenizer import Tokenizer
from tiny_tokenizers import ADDED, END, KINDS, build_tokenizer


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request, tmp_path_factory) -> Tokenizer:
    return build_tokenizer(request.param, tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory) -> Tokenizer:
    return build_tokenizer("byte_level", tmp_path_factory.mktemp("byte_level"))


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory) -> Tokenizer:
    return build_tokenizer("metaspace_byte_fallback", tmp_path_factory.mktemp("byte_fallback"))


def stream_all(stream: TextStream, token_ids: list[int], size: int = 1) -> tuple[str, int | None]:
    """Text, and the number of tokens used up to a stop word (None: none)."""
    text = ""
    for start in range(0, len(token_ids), size):
        delta, is_stopped = stream.push(token_ids[start : start + size], ends=False)
        text += delta
        if is_stopped:
            return text + stream.finish(), start + stream.num_tokens_used
    return text + stream.finish(), None


@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize("word", ["three four", " three", "three", "ree fo", "e"])
def test_row_5_stop_word_across_token_borders_stops_at_its_first_occurrence(tokenizer, word, size):
    sentence = "One two, three four. And three four."
    token_ids = tokenizer.encode(sentence)
    stream = TextStream(tokenizer, SamplingParams(stop=(word,)), ())
    text, num_used = stream_all(stream, token_ids, size)
    assert text == sentence[: sentence.index(word)]
    assert word in tokenizer.decode(token_ids[:num_used])
    assert word not in tokenizer.decode(token_ids[: num_used - 1])


def test_row_5_stop_word_never_shows_in_part(byte_level):
    stream = TextStream(byte_level, SamplingParams(stop=("four",)), ())
    letters = [token_id for c in "x fo four" for token_id in byte_level.encode(c)]
    deltas = [stream.push([token_id], ends=False)[0] for token_id in letters]
    assert deltas == ["x", " ", "", "", "fo ", "", "", "", ""]


@pytest.mark.parametrize("fires", range(5))
def test_row_7_any_of_five_stop_words_may_fire(tokenizer, fires):
    words = ["five", "six", "seven", "nine", "ten"]
    text, num_used = stream_all(
        TextStream(tokenizer, SamplingParams(stop=words), ()),
        tokenizer.encode(f"one two {words[fires]} three"),
    )
    assert text == "one two "
    assert num_used is not None


def test_row_7_earliest_in_the_text_wins_whatever_the_order_of_the_words(byte_level):
    token_ids = byte_level.encode("one two three four")
    for words in (("four", "two"), ("two", "four")):
        stream = TextStream(byte_level, SamplingParams(stop=words), ())
        assert stream.push(token_ids, ends=False) == ("one ", True)


def test_row_7_earliest_of_several_completed_by_one_token_wins(byte_level):
    token_ids = byte_level.encode(ADDED)
    assert len(token_ids) == 1
    for words in (("dich", "grüß"), ("grüß", "dich")):
        stream = TextStream(byte_level, SamplingParams(stop=words), ())
        assert stream.push(token_ids, ends=False) == ("[", True)


def test_stop_texts_count_beside_those_of_the_parameters(byte_level):
    token_ids = byte_level.encode("one two three four")
    stream = TextStream(byte_level, SamplingParams(stop=("four",)), ("two",))
    assert stream_all(stream, token_ids)[0] == "one "


def test_token_of_a_burst_that_completes_the_stop_word_is_reported(byte_level):
    letters = [token_id for c in "ab stop it" for token_id in byte_level.encode(c)]
    stream = TextStream(byte_level, SamplingParams(stop=("stop",)), ())
    stream.push(letters[:4], ends=False)
    assert stream.num_tokens_used == 4
    assert stream.push(letters[4:], ends=False) == ("", True)
    assert stream.num_tokens_used == 3
    assert stream.push([1], ends=False) == ("", True)
    assert stream.num_tokens_used == 0


def test_stop_word_completed_before_min_tokens_is_ordinary_text(byte_level):
    letters = [token_id for c in "a.b.c.d" for token_id in byte_level.encode(c)]
    for min_tokens, expected in [(0, "a"), (2, "a"), (3, "a.b"), (4, "a.b"), (5, "a.b.c")]:
        params = SamplingParams(stop=(".",), min_tokens=min_tokens)
        for size in (1, 3, 8):
            text, num_used = stream_all(TextStream(byte_level, params, ()), letters, size)
            assert (text, num_used) == (expected, len(expected) + 1)


def test_ignored_stop_word_that_may_become_a_longer_one_stays_ignored(byte_level):
    letters = [token_id for c in "xabyab" for token_id in byte_level.encode(c)]
    params = SamplingParams(stop=("ab", "abc"), min_tokens=4)
    assert stream_all(TextStream(byte_level, params, ()), letters) == ("xaby", 6)


def test_ignored_stop_word_in_a_run_of_byte_tokens_stays_ignored(byte_fallback):
    (newline,), (_, *accent) = byte_fallback.encode_words(["\n"])[0], byte_fallback.encode("é")
    params = SamplingParams(stop=("\n",), min_tokens=3)
    stream = TextStream(byte_fallback, params, ())
    assert stream_all(stream, [newline, *accent]) == ("\né", None)


def test_ignored_stop_word_is_not_held_back(byte_level):
    params = SamplingParams(stop=("four", "ab"), min_tokens=20)
    stream = TextStream(byte_level, params, ())
    letters = [token_id for c in "fab" for token_id in byte_level.encode(c)]
    assert [stream.push([token_id], ends=False)[0] for token_id in letters] == ["", "f", "ab"]


def test_stop_word_begun_before_min_tokens_and_completed_after_stops(byte_level):
    letters = [token_id for c in "abcdef" for token_id in byte_level.encode(c)]
    params = SamplingParams(stop=("bcd",), min_tokens=4)
    assert stream_all(TextStream(byte_level, params, ()), letters) == ("a", 4)


@pytest.mark.parametrize("word", ["\n", "\n\n", "é\n"])
def test_stop_word_spelt_in_byte_tokens_stops_without_waiting_for_the_next_token(
    byte_fallback, word
):
    token_ids = byte_fallback.encode("one" + word)
    text, num_used = stream_all(
        TextStream(byte_fallback, SamplingParams(stop=(word,)), ()), token_ids
    )
    assert (text, num_used) == ("one", len(token_ids))


def test_held_text_that_becomes_no_stop_word_comes_at_the_end(tokenizer):
    stream = TextStream(tokenizer, SamplingParams(stop=("three four",)), ())
    text, num_used = stream_all(stream, tokenizer.encode("two three f"))
    assert (text, num_used) == ("two three f", None)


@pytest.mark.parametrize("stop", [(), ("three four",)])
def test_text_of_an_end_token_is_never_returned(tokenizer, stop):
    """An end token may be any token, not only a special one."""
    token_ids = tokenizer.encode("two three")
    (ordinary,) = (ids for ids in tokenizer.encode_words([","]) if len(ids) == 1)
    stream = TextStream(tokenizer, SamplingParams(stop=stop), ())
    delta, is_stopped = stream.push([*token_ids, *ordinary], ends=True)
    assert not is_stopped
    assert delta + stream.finish() == "two three"


def test_name_of_a_special_token_as_stop_word_stops_at_that_token(tokenizer):
    before = tokenizer.encode("two three fo")
    token_ids = [*before, tokenizer.special_tokens[END], *tokenizer.encode("four")]
    stream = TextStream(tokenizer, SamplingParams(stop=(END, "four")), ())
    assert stream_all(stream, token_ids, size=8) == ("two three fo", len(before) + 1)


def test_bytes_before_a_special_token_that_stops_are_returned(byte_fallback):
    token_ids = [*byte_fallback.encode("two\n"), byte_fallback.special_tokens[END]]
    stream = TextStream(byte_fallback, SamplingParams(stop=(END,)), ())
    assert stream_all(stream, token_ids) == ("two\n", len(token_ids))
