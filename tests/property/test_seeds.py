"""A seed names one text, whatever shares the engine; with drafts, what holds of that."""

import random

import pytest

from alone import tokens_alone
from mfs_trt.request import PromptRequest
from mfs_trt.sampling_params import SamplingParams
from mfs_trt.serving.core import EngineCore
from run_together import Arrival, run_on
from tiny import tiny_engine, tiny_family, tiny_model

MODEL = tiny_model(tiny_family((1, 2, 4)), deep_scale=0.3)
PROMPT = [7, 23, 4, 41, 4, 19, 30, 2, 55]
LENGTH, SEED = 10, 11
PARAMS = {
    "temperature": {"temperature": 1.2},
    "filters": {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "penalties": {"temperature": 1.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
}


def seeded(name: str, tier: str, **fields) -> PromptRequest:
    params = SamplingParams(max_tokens=LENGTH, end_id=-1, seed=SEED, **PARAMS[name])
    return PromptRequest("mine", params, token_ids=PROMPT, tier=tier, **fields)


def neighbours(seed: int) -> list[Arrival]:
    """Of all tiers: greedy ones, others with the same seed or prompt, some that draft."""
    rng = random.Random(seed)
    arrivals = []
    for i in range(5):
        tier = rng.randrange(3)
        request = PromptRequest(
            f"other{i}",
            SamplingParams(
                max_tokens=rng.randint(4, 14),
                end_id=-1,
                temperature=rng.choice([None, 1.0, 2.0]),
                seed=rng.choice([SEED, i]),
            ),
            token_ids=[*PROMPT[: rng.choice([0, 5, 9])], rng.randrange(61), rng.randrange(61)],
            tier=f"t{tier}",
            draft_tiers=("t0",) if tier else (),
            num_speculative_tokens=2,
            priority=rng.randrange(2),
        )
        arrivals.append(Arrival(request, step=rng.randrange(4)))
    return arrivals


def text_in(others: list[Arrival], request: PromptRequest, **sizes) -> list[int]:
    engine = tiny_engine(MODEL, num_feature_slots=64, **sizes)
    core = EngineCore(engine, tokenizer=None)
    return run_on(core, [Arrival(request, step=1), *others])["mine"].token_ids


@pytest.mark.parametrize("tier", ("t0", "t2"))
@pytest.mark.parametrize("name", PARAMS)
def test_row_40_a_seed_gives_the_text_that_it_gives_alone_in_any_mix(name, tier):
    """Row 40: random numbers are shared over the batch."""
    request = seeded(name, tier)
    alone = tokens_alone(MODEL, PROMPT, request.params, [tier] * LENGTH)
    assert alone != tokens_alone(MODEL, PROMPT, SamplingParams(max_tokens=LENGTH), [tier] * LENGTH)
    assert text_in([], request) == alone
    for mix in range(3):
        assert text_in(neighbours(mix), request) == alone
    # Chunks of few tokens, and so little memory that requests make way for each other.
    tight = {"max_num_batched_tokens": 7, "num_frames": 1 + 5 * 4 + 4}
    assert text_in(neighbours(3), request, **tight) == alone


@pytest.mark.parametrize("chain", (("t0",), ("t0", "t1")), ids=str)
@pytest.mark.parametrize("name", PARAMS)
def test_row_40_with_drafts_a_seed_gives_the_same_text_each_time_to_a_request_alone(name, chain):
    """Row 40: seeds and speculation give gibberish. What holds beside others is the law (row 38),
    and for greedy requests the text.
    """
    request = seeded(name, "t2", draft_tiers=chain, num_speculative_tokens=2, reuse_prefix=False)
    texts = {tuple(text_in([], request)) for _ in range(3)}
    assert len(texts) == 1
    other = SamplingParams(**{**request.params.__dict__, "seed": SEED + 1})
    again = PromptRequest(**{**request.__dict__, "params": other})
    assert tuple(text_in([], again)) not in texts
