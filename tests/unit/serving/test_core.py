"""The core: what it refuses, what one step gives to whom, how sequences end."""

import math

import numpy as np
import pytest

from mfs_trt.builder.build import build_engine
from mfs_trt.builder.config import BuildConfig
from mfs_trt.errors import FamilyError, InvalidRequestError, RequestTooLargeError
from mfs_trt.request import FinishReason, PromptRequest
from mfs_trt.sampling_params import SamplingParams
from mfs_trt.serving.core import EngineCore, load_core
from tiny import drain, run_alone, submit, tiny_engine, tiny_family, tiny_model
from tiny_tokenizers import build_tokenizer

FAMILY = tiny_family((1, 2, 4))
MODEL = tiny_model(FAMILY)
PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture
def core():
    return EngineCore(tiny_engine(MODEL), tokenizer=None)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return build_tokenizer("byte_level", tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def text_core(tokenizer):
    """A core that speaks text; its model's vocabulary is the tokenizer's."""
    family = tiny_family((1, 2), vocab_size=tokenizer.vocab_size)
    return EngineCore(tiny_engine(tiny_model(family)), tokenizer)


def ask(core: EngineCore, **fields):
    """Run one request to its end; returns its events."""
    fields = {"token_ids": PROMPT, **fields}
    params = SamplingParams(**{"max_tokens": 6, "end_id": -1, **fields.pop("params", {})})
    submit(core, PromptRequest("r", params, **fields))
    return drain(core)


def tokens(events) -> list[int]:
    return [t for e in events for t in e.token_ids]


# -- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "exactly one of prompt, token_ids and messages, got none"),
        ({"prompt": "a", "token_ids": [1]}, "exactly one of .*, got prompt, token_ids"),
        ({"token_ids": []}, "token_ids: expected at least one token"),
        ({"token_ids": [1, 61]}, "token_ids: expected token ids from 0 to 60, got 61"),
        ({"token_ids": [-1]}, "token_ids: expected token ids from 0 to 60, got -1"),
        ({"prompt": "a"}, "prompt: expected token ids, for this family has no tokenizer"),
        ({"messages": [{"role": "user", "content": "a"}]}, "messages: expected token ids"),
    ],
)
def test_prompt_that_cannot_be_served_is_refused(core, fields, message):
    with pytest.raises(InvalidRequestError, match=message):
        core.make_requests(PromptRequest("r", **fields))
    assert not core.has_requests


def test_unknown_tier_and_too_long_request_are_refused(core):
    with pytest.raises(FamilyError, match="expected one of t0, t1, t2, got 'huge'"):
        core.make_requests(PromptRequest("r", token_ids=PROMPT, tier="huge"))
    params = SamplingParams(max_tokens=124)
    with pytest.raises(RequestTooLargeError, match=r"129 tokens.*128"):
        core.make_requests(PromptRequest("r", params, token_ids=PROMPT))


def test_bad_words_without_a_tokenizer_are_refused(core):
    params = SamplingParams(bad_words=("no",))
    with pytest.raises(InvalidRequestError, match="bad_words: expected token ids"):
        core.make_requests(PromptRequest("r", params, token_ids=PROMPT))


# -- sequences -----------------------------------------------------------------------------------


def test_each_sequence_has_an_id_and_a_seed_of_its_own(core):
    params = SamplingParams(n=3, seed=2**64 - 2, max_tokens=2)
    sequences = core.make_requests(PromptRequest("r", params, token_ids=PROMPT))
    assert [s.request_id for s in sequences] == ["r#0", "r#1", "r#2"]
    assert [s.seed for s in sequences] == [2**64 - 2, 2**64 - 1, 0]
    assert len({s.arrival_time_s for s in sequences}) == 1


def test_seed_is_drawn_where_none_is_given(core):
    params = SamplingParams(temperature=1.0, max_tokens=2)
    request = PromptRequest("r", params, token_ids=PROMPT)
    assert core.make_requests(request)[0].seed != core.make_requests(request)[0].seed


def test_sequences_of_one_request_differ_and_equal_those_of_their_seeds(core):
    params = {"n": 3, "seed": 5, "temperature": 1.0}
    events = ask(core, params=params)
    for i in range(3):
        mine = tokens(e for e in events if e.sequence_index == i)
        alone = run_alone(
            MODEL,
            PROMPT,
            "t2",
            SamplingParams(max_tokens=6, end_id=-1, seed=5 + i, temperature=1.0),
        )
        assert mine == alone
    assert len({tuple(tokens(e for e in events if e.sequence_index == i)) for i in range(3)}) == 3


# -- events --------------------------------------------------------------------------------------


def test_each_step_gives_each_sequence_one_event_until_its_last(core):
    events = ask(core, tier="t1")
    assert [e.num_output_tokens for e in events] == [1, 2, 3, 4, 5, 6]
    assert [e.finish_reason for e in events] == [None] * 5 + [FinishReason.LENGTH]
    assert {(e.request_id, e.tier, e.num_prompt_tokens) for e in events} == {("r", "t1", 5)}
    assert core.num_steps == 6 and core.last_step_duration_s > 0


def test_every_request_gets_the_logits_and_log_probs_of_its_own_row(core):
    params = SamplingParams(
        max_tokens=3, end_id=-1, return_log_probs=True, return_generation_logits=True
    )
    for tier in ("t1", "t0", "t2"):
        submit(core, PromptRequest(tier, params, token_ids=PROMPT, tier=tier))
    together = drain(core)
    for tier in ("t0", "t1", "t2"):
        submit(core, PromptRequest(tier, params, token_ids=PROMPT, tier=tier))
        total = 0.0
        for alone, event in zip(
            drain(core), (e for e in together if e.request_id == tier), strict=True
        ):
            np.testing.assert_allclose(event.logits, alone.logits, atol=1e-6)
            assert event.logits.shape == (1, 61) and event.logits.dtype == np.float32
            (token_id,) = event.token_ids
            row = event.logits[0].astype(np.float64)
            assert token_id == row.argmax()
            log_prob = row[token_id] - np.log(np.exp(row).sum())
            total += log_prob
            assert math.isclose(event.log_probs[0], log_prob, abs_tol=1e-5)
            assert math.isclose(event.cumulative_log_prob, total, abs_tol=1e-5)


def test_requests_of_different_tiers_are_sampled_by_their_own_parameters(core):
    wishes = {
        "t0": SamplingParams(max_tokens=5, end_id=-1, temperature=2.0, seed=1),
        "t1": SamplingParams(max_tokens=5, end_id=-1),
        "t2": SamplingParams(max_tokens=5, end_id=-1, temperature=2.0, seed=9),
    }
    for tier, params in wishes.items():
        submit(core, PromptRequest(tier, params, token_ids=PROMPT, tier=tier))
    events = drain(core)
    for tier, params in wishes.items():
        mine = tokens(e for e in events if e.request_id == tier)
        assert mine == run_alone(MODEL, PROMPT, tier, params)


def test_log_probs_and_logits_come_only_when_asked_for(core):
    event = ask(core)[0]
    assert event.log_probs == () and event.logits is None and event.cumulative_log_prob == 0.0


# -- ends ----------------------------------------------------------------------------------------


def test_end_tokens_are_the_familys_unless_the_request_says_otherwise(core):
    free_run = tokens(ask(core))
    end = free_run[2]
    first = free_run.index(end) + 1
    assert tokens(ask(core, params={"end_id": end})) == free_run[:first]
    assert tokens(ask(core, params={"end_id": 10**6})) == free_run
    object.__setattr__(core.family, "end_token_ids", (end,))
    try:
        events = ask(core, params={"end_id": None})
        assert tokens(events) == free_run[:first]
        assert events[-1].finish_reason is FinishReason.STOP
        assert tokens(ask(core, params={"end_id": None, "ignore_eos": True})) == free_run
    finally:
        object.__setattr__(core.family, "end_token_ids", ())


def test_min_tokens_bans_the_end_token_before(core):
    end = tokens(ask(core))[0]
    events = ask(core, params={"end_id": end, "min_tokens": 4})
    assert end not in tokens(events)[:3]
    assert len(tokens(events)) >= 4


def test_bad_token_ids_are_never_generated(core):
    free_run = tokens(ask(core))
    banned = ask(core, bad_token_ids=((free_run[0],), (free_run[1],)))
    assert not set(free_run[:2]) & set(tokens(banned))


def test_abort_ends_every_sequence_of_the_request_and_no_other(core):
    params = SamplingParams(max_tokens=5, n=3, temperature=1.0, end_id=-1)
    submit(core, PromptRequest("r", params, token_ids=PROMPT))
    submit(core, PromptRequest("r2", SamplingParams(max_tokens=5), token_ids=PROMPT))
    core.step()
    core.abort("r")
    core.abort("unknown")
    assert list(core.scheduler.requests) == ["r2#0"]
    assert {e.request_id for e in drain(core)} == {"r2"}
    assert core.scheduler.kv_cache.num_used_frames == 0


def test_reset_forgets_everything_and_serves_on(core):
    expected = tokens(ask(core))
    submit(core, PromptRequest("lost", token_ids=PROMPT, params=SamplingParams(max_tokens=9)))
    core.step()
    core.reset()
    assert not core.has_requests and core.scheduler.kv_cache.num_used_frames == 0
    assert tokens(ask(core)) == expected


# -- text ----------------------------------------------------------------------------------------


def text_of(events) -> str:
    return "".join(e.text for e in events)


def test_text_of_the_events_is_the_decode_of_their_tokens(text_core, tokenizer):
    events = ask(text_core, prompt="Hello world", token_ids=None, params={"max_tokens": 20})
    assert text_of(events) == tokenizer.decode(tokens(events))
    assert events[0].num_prompt_tokens == len(tokenizer.encode("Hello world"))


def test_messages_go_through_the_chat_template(text_core, tokenizer):
    messages = [{"role": "user", "content": "Hello"}]
    by_template = ask(text_core, messages=messages, token_ids=None)
    by_ids = ask(text_core, token_ids=tokenizer.apply_chat_template(messages))
    assert tokens(by_template) == tokens(by_ids)


@pytest.mark.parametrize("given", ["word", "token ids"])
def test_stop_word_ends_the_text_before_it_and_frees(text_core, tokenizer, given):
    params = {"max_tokens": 20}
    free_run = ask(text_core, params=params)
    whole = text_of(free_run)
    word = whole[4:7]
    fields = {}
    if given == "word":
        params["stop"] = (word,)
    else:
        fields["stop_token_ids"] = (tuple(tokenizer.encode(word, add_special_tokens=False)),)
    events = ask(text_core, params=params, **fields)
    assert text_of(events) == whole[: whole.index(word)]
    assert events[-1].finish_reason is FinishReason.STOP
    assert len(events) < len(free_run)
    assert text_core.scheduler.kv_cache.num_used_frames == 0
    assert not text_core.has_requests


def test_stop_word_in_the_last_token_allowed_is_a_stop(text_core):
    whole = text_of(ask(text_core, params={"max_tokens": 20}))
    word = whole[4:7]
    length = len(ask(text_core, params={"max_tokens": 20, "stop": (word,)}))
    events = ask(text_core, params={"max_tokens": length, "stop": (word,)})
    assert events[-1].finish_reason is FinishReason.STOP
    assert text_of(events) == whole[: whole.index(word)]


def test_text_held_back_for_a_stop_word_comes_with_the_last_token(text_core):
    params = {"max_tokens": 20}
    whole = text_of(ask(text_core, params=params))
    events = ask(text_core, params={**params, "stop": (whole[-2:] + "never",)})
    assert text_of(events) == whole


def test_bad_words_are_never_in_the_text(text_core):
    params = {"max_tokens": 20}
    word = text_of(ask(text_core, params=params)).strip()[0]
    assert not text_of(ask(text_core, params={**params, "bad_words": (word,)})).startswith(word)


# -- loading -------------------------------------------------------------------------------------


def test_core_of_an_engine_folder_serves_its_family(family_folder, hf_folder, tmp_path):
    family = family_folder(hf_folder())
    core = load_core(
        build_engine(
            family, tmp_path / "ids", BuildConfig(target="reference", memory_nbytes=1 << 22)
        )
    )
    assert core.tokenizer is None
    assert len(tokens(ask(core, token_ids=[1, 2, 3], tier="t1"))) == 6


def test_core_of_a_family_with_a_tokenizer_speaks_text(family_folder, hf_folder, tmp_path):
    source = hf_folder(vocab_size=512)
    build_tokenizer("byte_level", source)
    family = family_folder(source)
    core = load_core(
        build_engine(
            family, tmp_path / "text", BuildConfig(target="reference", memory_nbytes=1 << 22)
        )
    )
    assert core.tokenizer is not None
    events = ask(core, prompt="Hello", token_ids=None)
    assert text_of(events) == core.tokenizer.decode(tokens(events))
