"""What people complained of in streamed text and stop words, on the real server."""

import numpy as np
import pytest

from mfs_trt.sampling_params import DEFAULT_MAX_TOKENS, SamplingParams
from probes import HttpStream, generate, wait_until
from streams import Stream

pytestmark = pytest.mark.triton

PROMPT = "the river moves"
SENTENCE = "One two three four five six, and so on. One two three four five six."
BROKEN = "\ufffd"


def let_it_say(slow_server, text: str) -> list[int]:
    """Every request now gets this text's tokens, which are returned."""
    token_ids = slow_server.offline.tokenizer.encode(text)
    slow_server.set("script", token_ids)
    return token_ids


def stream(server, *outputs: str, model: str = "ensemble", **fields) -> Stream:
    fields = {"text_input": PROMPT, "stream": True, **fields}
    return Stream(server.grpc_port, fields, model=model, outputs=("text_output", *outputs))


def final_flags(done: Stream) -> list[bool]:
    return [r.get_response().parameters["triton_final_response"].bool_param for r in done.results]


# -- 1 to 4: from tokens to text, piece by piece -------------------------------------------------


def test_row_1_streamed_text_has_its_spaces(slow_server):
    """Row 1: streamed text has no spaces."""
    token_ids = let_it_say(slow_server, SENTENCE)
    done = stream(slow_server, max_tokens=len(token_ids)).finish()
    assert done.text == SENTENCE
    assert sum(1 for chunk in done.chunks if chunk) > 10


@pytest.mark.parametrize("tier", ("small", "large"))
def test_row_1_streamed_text_has_its_spaces_with_sentencepiece(
    mixed_server, sentencepiece_llm, tier
):
    """Row 1: streamed text has no spaces."""
    done = stream(
        mixed_server, "output_ids", model="sentencepiece", tier=tier, max_tokens=300,
        temperature=3.0, seed=1, ignore_eos=True,
    ).finish()  # fmt: skip
    assert done.text == sentencepiece_llm.tokenizer.decode(done.values("output_ids"))
    assert done.text.count(" ") > 20


def test_row_1_prompt_and_answer_in_one_text_have_the_space_between_them(
    mixed_server, sentencepiece_llm
):
    """Row 1: streamed text has no spaces."""
    tokenizer = sentencepiece_llm.tokenizer
    done = stream(
        mixed_server, "output_ids", model="sentencepiece", stream=False, max_tokens=300,
        temperature=3.0, seed=1, ignore_eos=True,
    ).finish()  # fmt: skip
    assert done.text == tokenizer.decode(done.values("output_ids"))


@pytest.mark.parametrize("text", ["龍鬱驚。", "👩‍👩‍👧‍👦 fine 👍🏽", "Łódź, señor ☕"])
def test_row_2_characters_split_over_tokens_arrive_whole(slow_server, text):
    """Row 2: CJK and emoji garbled while streaming."""
    token_ids = let_it_say(slow_server, text)
    done = stream(slow_server, max_tokens=len(token_ids)).finish()
    assert "" in done.chunks[:-1]  # a character takes several tokens
    assert not any(BROKEN in chunk for chunk in done.chunks)
    assert done.text == text


def test_row_2_bytes_held_for_a_character_come_with_the_last_response(slow_server):
    """Row 2: CJK and emoji garbled while streaming."""
    token_ids = let_it_say(slow_server, "a 😀")[:-1]
    done = stream(slow_server, max_tokens=len(token_ids)).finish()
    assert done.text == slow_server.offline.tokenizer.decode(token_ids)
    assert [BROKEN in chunk for chunk in done.chunks] == [False] * (len(token_ids) - 1) + [True]


def test_row_3_spaces_survive_at_the_borders_of_responses_of_several_tokens(slow_server):
    """Row 3: space lost at a chunk border with several tokens per chunk."""
    text = SENTENCE * 4
    token_ids = let_it_say(slow_server, text)
    slow_server.clear("step_delay_s")
    slow_server.set("respond_delay_s", "0.2")  # tokens pile up and share a response
    done = stream(
        slow_server, "num_output_tokens", max_tokens=len(token_ids), return_num_output_tokens=True
    ).finish()
    assert max(done.values("num_output_tokens")) > 2
    assert done.text == text


def test_row_4_responses_are_disjoint_deltas(server, llm):
    """Row 4: each chunk repeats the whole history."""
    done = stream(
        server, "num_output_tokens", max_tokens=24, return_num_output_tokens=True
    ).finish()
    expected = llm.generate(PROMPT, SamplingParams(max_tokens=24))[0].outputs[0]
    assert len(done.chunks) > 2
    assert done.text == expected.text
    assert sum(done.values("num_output_tokens")) == len(expected.token_ids)


def test_row_4_streamed_token_ids_are_disjoint_deltas(server, llm):
    """Row 4: each chunk repeats the whole history."""
    ids = llm.tokenizer.encode(PROMPT)
    expected = llm.generate([ids], SamplingParams(max_tokens=24))[0].outputs[0].token_ids
    done = Stream(
        server.grpc_port,
        {"input_ids": ids, "input_lengths": len(ids), "request_output_len": 24, "streaming": True},
        model="tensorrt_llm",
        outputs=("output_ids", "sequence_length"),
    ).finish()
    assert done.values("output_ids") == expected
    assert sum(done.values("sequence_length")) == len(expected)


# -- 5, 7, 8: where a text ends ------------------------------------------------------------------

STOP_WORDS = (" four", "four", "ree fo", "x, and", "o", ". One")


@pytest.mark.parametrize("word", STOP_WORDS)
@pytest.mark.parametrize("is_streaming", (True, False))
def test_row_5_a_stop_word_ends_the_text_at_its_first_occurrence(slow_server, word, is_streaming):
    """Row 5: stop words ignored."""
    token_ids = let_it_say(slow_server, SENTENCE)
    done = stream(
        slow_server, "finish_reason", "num_output_tokens", stream=is_streaming,
        exclude_input_in_output=True, max_tokens=len(token_ids), stop_words=[word],
        return_num_output_tokens=True,
    ).finish()  # fmt: skip
    assert done.text == SENTENCE[: SENTENCE.index(word)]
    assert done.values("finish_reason")[-1] == b"stop"
    assert sum(done.values("num_output_tokens")) < len(token_ids)


def test_row_5_some_of_these_stop_words_cross_token_borders(slow_server):
    """Row 5: stop words ignored."""
    tokenizer = slow_server.offline.tokenizer
    pieces = [tokenizer.decode([t]) for t in tokenizer.encode(SENTENCE)]
    assert sum(not any(word in piece for piece in pieces) for word in STOP_WORDS) >= 3


def test_row_5_a_stop_word_given_as_tokens_stops_where_the_text_has_other_tokens(slow_server):
    """Row 5: stop words ignored."""
    token_ids = let_it_say(slow_server, SENTENCE)
    tokenizer = slow_server.offline.tokenizer
    word = tokenizer.encode("ree fo", add_special_tokens=False)
    spelt = [token_ids[i : i + len(word)] for i in range(len(token_ids))]
    assert word not in spelt
    done = Stream(
        slow_server.grpc_port,
        {
            "input_ids": [1], "input_lengths": 1, "request_output_len": len(token_ids),
            "streaming": True,
            "stop_words_list": np.array([[word, [len(word)] + [-1] * (len(word) - 1)]], np.int32),
        },
        model="tensorrt_llm",
        outputs=("output_ids", "finish_reason"),
    ).finish()  # fmt: skip
    assert "ree fo" in tokenizer.decode(done.values("output_ids"))
    assert len(done.values("output_ids")) < len(token_ids) // 2
    assert done.values("finish_reason")[-1] == b"stop"


@pytest.mark.parametrize("place", range(5))
def test_row_7_any_of_five_stop_words_fires(slow_server, place):
    """Row 7: only the first of several stop words works."""
    token_ids = let_it_say(slow_server, SENTENCE)
    words = ["zebra", "yak", " wolf", "\n\n", "viper"]
    words[place] = "five six,"
    done = stream(slow_server, max_tokens=len(token_ids), stop_words=words).finish()
    assert done.text == "One two three four "


def test_row_7_rows_of_a_batch_have_stop_words_of_their_own(slow_server):
    """Row 7: only the first of several stop words works."""
    token_ids = let_it_say(slow_server, SENTENCE)
    ragged = [[b"three", b"", b""], [b"zebra", b"yak", b" six"], [b"", b"", b""]]
    done = stream(
        slow_server, "batch_index",
        text_input=np.array([[b"a"], [b"b"], [b"c"]], np.object_),
        max_tokens=np.full((3, 1), len(token_ids), np.int32),
        stop_words=np.array(ragged, np.object_),
        stream=np.zeros((3, 1), bool),
        exclude_input_in_output=np.ones((3, 1), bool),
    ).finish()  # fmt: skip
    texts = dict(zip(done.values("batch_index"), done.chunks, strict=True))
    assert texts == {0: "One two ", 1: "One two three four five", 2: SENTENCE}
    assert final_flags(done) == [False, False, True]


@pytest.mark.parametrize("case", ("minus one", "vocabulary size", "first generated token"))
def test_row_8_any_end_id_gets_an_answer(server, llm, case):
    """Row 8: no response when end_id is set."""
    expected = llm.generate(PROMPT, SamplingParams(max_tokens=8, ignore_eos=True))[0].outputs[0]
    end_id = {
        "minus one": -1,
        "vocabulary size": llm.family.model.vocab_size,
        "first generated token": expected.token_ids[0],
    }[case]
    text, reason = ("", "stop") if case == "first generated token" else (expected.text, "length")
    answer = generate(
        server, text_input=PROMPT, max_tokens=8, end_id=end_id, exclude_input_in_output=True
    )
    assert (answer["text_output"], answer["finish_reason"]) == (text, reason)
    done = stream(server, "finish_reason", max_tokens=8, end_id=end_id).finish(timeout_s=20)
    assert done.text == text
    assert done.values("finish_reason")[-1] == reason.encode()
    assert final_flags(done)[-1] is True


# -- 12, 13, 14, 44: when and how the answer comes -----------------------------------------------


def test_row_12_each_token_leaves_before_the_next_is_computed(slow_server):
    """Row 12: "stream" delivers everything at the end."""
    slow_server.set("hold")
    running = stream(slow_server, max_tokens=4, ignore_eos=True)
    for count in range(1, 5):
        slow_server.step()
        wait_until(lambda count=count: len(running.results) == count)
    running.finish()
    assert len(running.chunks) == 4


def test_row_12_the_first_server_sent_event_leaves_before_the_second_step(slow_server):
    """Row 12: "stream" delivers everything at the end."""
    slow_server.set("hold")
    running = HttpStream(slow_server, text_input=PROMPT, max_tokens=4, ignore_eos=True)
    slow_server.step()
    running.wait_first()
    running.disconnect()


def test_row_13_without_max_tokens_the_documented_number_is_generated(server):
    """Row 13: the answer is cut at 16 tokens."""
    answer = generate(server, text_input=PROMPT, ignore_eos=True, return_num_output_tokens=True)
    assert answer["num_output_tokens"] == DEFAULT_MAX_TOKENS == 128
    assert answer["finish_reason"] == "length"


@pytest.mark.parametrize("max_tokens", (1, 15, 16, 17, 200))
def test_row_13_max_tokens_is_kept_and_the_reason_is_length(server, max_tokens):
    """Row 13: the answer is cut at 16 tokens."""
    answer = generate(
        server, text_input=PROMPT, max_tokens=max_tokens, ignore_eos=True,
        return_num_output_tokens=True,
    )  # fmt: skip
    assert answer["num_output_tokens"] == max_tokens
    assert answer["finish_reason"] == "length"


def test_row_13_an_end_token_on_the_last_allowed_token_is_a_stop(slow_server):
    """Row 13: the answer is cut at 16 tokens."""
    tokenizer = slow_server.offline.tokenizer
    end = tokenizer.end_token_ids[0]
    slow_server.set("script", [*tokenizer.encode("One"), end])
    count = len(tokenizer.encode("One")) + 1
    for max_tokens, reason in ((count + 5, "stop"), (count, "stop"), (count - 1, "length")):
        answer = generate(
            slow_server, text_input=PROMPT, max_tokens=max_tokens, exclude_input_in_output=True
        )
        assert (answer["text_output"], answer["finish_reason"]) == ("One", reason)


OPENAI_REQUESTS = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8, "top_p": 0.9, "seed": 11},
    "penalised": {"temperature": 0.0, "frequency_penalty": 0.5, "presence_penalty": -0.5},
    "stopped": {"temperature": 0.0},
    "all": {
        "temperature": 1.0, "top_p": 1.0, "seed": 0, "frequency_penalty": 0.0,
        "presence_penalty": 0.0, "stop_words": ["STOP"],
    },
}  # fmt: skip


@pytest.mark.parametrize("name", OPENAI_REQUESTS)
@pytest.mark.parametrize("is_streaming", (True, False))
def test_row_14_openai_shaped_requests_get_text_usage_and_one_final_response(
    server, llm, name, is_streaming
):
    """Row 14: chat completions through the TensorRT-LLM pipeline misbehave."""
    asked = dict(OPENAI_REQUESTS[name])
    words = asked.pop("stop_words", ())
    if name == "stopped":  # a word that does come
        free = llm.generate(PROMPT, SamplingParams(max_tokens=20))[0].outputs[0]
        words = ["zebra", free.text[8:11]]
    params = {**asked, "stop": tuple(words)}
    if words:
        asked["stop_words"] = words
    expected = llm.generate(PROMPT, SamplingParams(max_tokens=20, **params))[0]
    done = stream(
        server, "num_input_tokens", "num_output_tokens", "finish_reason",
        stream=is_streaming, max_tokens=20, return_num_input_tokens=True,
        return_num_output_tokens=True, **asked,
    ).finish()  # fmt: skip
    echo = "" if is_streaming else PROMPT
    output = expected.outputs[0]
    assert done.text == echo + output.text
    assert set(done.values("num_input_tokens")) == {len(llm.tokenizer.encode(PROMPT))}
    assert sum(done.values("num_output_tokens")) == len(output.token_ids)
    assert done.values("finish_reason")[-1] == output.finish_reason.value.encode()
    assert final_flags(done).count(True) == 1 and final_flags(done)[-1]
    assert len(done.times_s) == len(done.results)  # and nothing without tokens


@pytest.mark.parametrize("is_streaming", (True, False))
def test_row_44_nothing_is_sent_while_a_long_prompt_is_computed_in_chunks(
    slow_server, is_streaming
):
    """Row 44: chunked prefill emits empty outputs."""
    budget = slow_server.max_num_batched_tokens
    slow_server.set("hold")
    _, rows_before = slow_server.work()
    running = stream(
        slow_server, "arrival_time_ns", "first_token_time_ns", "num_output_tokens",
        text_input=SENTENCE * 8, max_tokens=2, stream=is_streaming, ignore_eos=True,
        return_perf_metrics=True, return_num_output_tokens=True, reuse_prefix=False,
    )  # fmt: skip
    num_prompt_tokens = len(slow_server.offline.tokenizer.encode(SENTENCE * 8))
    num_chunks = -(-num_prompt_tokens // budget)
    assert num_chunks >= 3
    slow_server.step(num_chunks - 1)
    assert slow_server.work()[1] - rows_before == budget * (num_chunks - 1)
    assert not running._done.wait(0.2) and not running.times_s
    slow_server.clear("hold")
    done = running.finish()
    assert sum(done.values("num_output_tokens")) == 2
    assert min(done.values("num_output_tokens")) > 0
    waited_ns = done.values("first_token_time_ns")[0] - done.values("arrival_time_ns")[0]
    assert waited_ns > 0.2e9  # counted at the first real token
