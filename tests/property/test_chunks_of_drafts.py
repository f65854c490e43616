"""Chunks of any size while tiers draft: the tokens of a request alone."""

import random

import pytest

from alone import tokens_alone
from mfs_trt.request import PromptRequest
from mfs_trt.sampling_params import SamplingParams
from mfs_trt.serving.core import EngineCore
from run_together import Arrival, run_on
from tiny import tiny_engine, tiny_family, tiny_model

BLOCK, LENGTH = 4, 8
MODELS = [tiny_model(tiny_family((1, 2, 4)), deep_scale=scale) for scale in (1.0, 0.1)]
PARAMS = SamplingParams(max_tokens=LENGTH, end_id=-1)


@pytest.mark.parametrize("chain", (("t0",), ("t0", "t1")), ids=str)
@pytest.mark.parametrize("chunk", (1, BLOCK - 1, BLOCK, BLOCK + 1, 64))
def test_row_45_chunks_of_any_size_give_the_same_tokens_while_tiers_draft(chunk, chain):
    """Row 45: chunking options crash the engine."""
    rng = random.Random(chunk)
    for agrees, length in ((False, 1), (True, BLOCK - 1), (False, BLOCK), (True, BLOCK + 1),
                           (False, 23)):  # fmt: skip
        model, prompt = MODELS[agrees], [rng.randrange(61) for _ in range(length)]
        engine = tiny_engine(
            model, block_size=BLOCK, max_num_batched_tokens=chunk, num_feature_slots=16 * BLOCK
        )
        core = EngineCore(engine, tokenizer=None)
        drafting = PromptRequest(
            "drafting", PARAMS, token_ids=prompt, tier="t2", draft_tiers=chain,
            num_speculative_tokens=3,
        )  # fmt: skip
        beside = PromptRequest("beside", PARAMS, token_ids=prompt[::-1], tier="t1")
        arrivals = [Arrival(drafting), Arrival(beside, step=2)]
        served = run_on(core, arrivals)
        for arrival in arrivals:
            request, got = arrival.request, served[arrival.request.request_id]
            assert got.token_ids == tokens_alone(model, request.token_ids, PARAMS, got.tiers)
            assert len(got.token_ids) == LENGTH
