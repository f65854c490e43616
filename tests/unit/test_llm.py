"""LLM: prompts in, outputs in their order; several streams may be open at once."""

import pytest

from hf_models import make_hf_folder
from mfs_trt.builder.build import build_engine
from mfs_trt.builder.config import BuildConfig
from mfs_trt.checkpoint import open_checkpoint
from mfs_trt.errors import InvalidRequestError
from mfs_trt.family.spec import TierSpec
from mfs_trt.llm import LLM
from mfs_trt.sampling_params import SamplingParams
from mfs_trt.weights.convert import convert_checkpoint
from tiny_tokenizers import build_tokenizer

PARAMS = SamplingParams(max_tokens=5, end_id=-1)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llm")
    source = make_hf_folder(folder / "hf", "llama", vocab_size=512, initializer_range=0.2)
    build_tokenizer("byte_level", source)
    tiers = (TierSpec("small", 2), TierSpec("large", 6))
    convert_checkpoint(open_checkpoint(source), tiers, folder / "family")
    return LLM(
        build_engine(
            folder / "family",
            folder / "engine",
            BuildConfig(target="reference", memory_nbytes=4 << 20),
        )
    )


def only(outputs):
    (output,) = outputs
    (completion,) = output.outputs
    return completion


def test_an_output_names_the_tier_that_it_finished_at(llm):
    fields = {"tier_policy": "cascade", "cascade_threshold": 0.0}
    params = SamplingParams(max_tokens=12, end_id=-1)
    (escalated,) = llm.generate("Hello", params, **fields)
    (short,) = llm.generate("Hello", PARAMS, **fields)
    assert (escalated.tier, short.tier) == ("large", "small")


def test_outputs_come_in_the_order_of_their_prompts(llm):
    prompts = ["Hello", [1, 2, 3], "The stop word"]
    together = llm.generate(prompts, PARAMS, tier=["large", "small", "large"])
    assert [o.tier for o in together] == ["large", "small", "large"]
    for prompt, output in zip(prompts, together, strict=True):
        alone = only(llm.generate(prompt, PARAMS, tier=output.tier))
        assert output.outputs == [alone]
        assert len(alone.token_ids) == 5 and alone.text == llm.tokenizer.decode(alone.token_ids)


def test_order_holds_beyond_nine_prompts(llm):
    outputs = llm.generate([[i] for i in range(12)], SamplingParams(max_tokens=1))
    assert [int(o.request_id) for o in outputs] == sorted(int(o.request_id) for o in outputs)
    firsts = [only(llm.generate([i], SamplingParams(max_tokens=1))).token_ids for i in range(12)]
    assert [o.outputs[0].token_ids for o in outputs] == firsts


def test_chat_answers_one_conversation_or_several(llm):
    first, second = ([{"role": "user", "content": text}] for text in ("Hello", "Good morning"))
    answers = [only(llm.chat(m, PARAMS)) for m in (first, second)]
    assert [o.outputs[0] for o in llm.chat([first, second], PARAMS)] == answers
    ids = llm.tokenizer.apply_chat_template(first)
    assert only(llm.generate(ids, PARAMS)).token_ids == answers[0].token_ids


def test_nothing_asked_is_nothing_answered(llm):
    assert llm.generate([], PARAMS) == [] and llm.chat([], PARAMS) == []


def test_several_tiers_stream_one_prompt_side_by_side(llm):
    events = list(llm.stream("Hello", PARAMS, tier=["small", "large"]))
    for tier in ("small", "large"):
        mine = [t for e in events if e.tier == tier for t in e.token_ids]
        assert mine == only(llm.generate("Hello", PARAMS, tier=tier)).token_ids


def test_streams_that_are_open_together_keep_their_own_events(llm):
    first, second = llm.stream("Hello", PARAMS), llm.stream([1, 2, 3], PARAMS, tier="small")
    events = ([next(first)], [next(second)])
    between = only(llm.generate("The stop word", PARAMS))  # runs past both streams' ends
    events[0].extend(first)
    events[1].extend(second)
    for mine, prompt, tier in zip(events, ("Hello", [1, 2, 3]), ("large", "small"), strict=True):
        expected = only(llm.generate(prompt, PARAMS, tier=tier)).token_ids
        assert [t for e in mine for t in e.token_ids] == expected
    assert between == only(llm.generate("The stop word", PARAMS))


def test_stream_that_is_left_early_frees_its_memory(llm):
    stream = llm.stream("Hello", SamplingParams(max_tokens=50, end_id=-1))
    next(stream)
    stream.close()
    assert not llm._core.has_requests and not llm._inboxes
    assert llm._core.scheduler.kv_cache.num_used_frames == 0


def test_one_wrong_prompt_queues_none(llm):
    with pytest.raises(InvalidRequestError):
        llm.generate([[1], [-1]], PARAMS)
    with pytest.raises(InvalidRequestError, match="tier: expected one or 2, .* got 3"):
        llm.generate([[1], [2]], PARAMS, tier=["small"] * 3)
    assert not llm._core.has_requests and not llm._inboxes
