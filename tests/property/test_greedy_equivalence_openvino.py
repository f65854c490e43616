"""The law on the compiled engine: in fp32 each request gets the tokens that it gets alone.

Up to argmax ties: where the two runs part, both tokens' logits differ by less than 1e-5 of the
logits' spread. Such ties are counted, and few are allowed.
"""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from alone import logits_alone, tokens_alone
from mfs_trt.engine.interface import EngineLimits
from mfs_trt.request import PromptRequest
from mfs_trt.sampling_params import SamplingParams
from run_together import Arrival, run_together
from steps import num_ties
from tiny_folders import OpenVinoPlans, folder_family

BLOCK_SIZE = 32
CHUNKS = (1, 31, 32, 33, 200)
MAX_MODEL_LEN = 128
FAMILIES = {
    "qwen3, m = 1": folder_family((1, 2, 3), (), "qwen3", qk_norm=True),
    "mistral, m = 1, 1, 2": folder_family(
        (1, 2, 4), (0,), "mistral", sliding_window=40, windowed_layers=(0, 2)
    ),
    "qwen2, m = 1, 3": folder_family((1, 4), (), "qwen2", qkv_bias=True),
}


@pytest.fixture(scope="module")
def plans(tmp_path_factory):
    return {
        name: OpenVinoPlans(tmp_path_factory.mktemp("plans"), family)
        for name, family in FAMILIES.items()
    }


@st.composite
def workloads(draw):
    """A family, an engine's sizes and requests that arrive, and may be cancelled, at any step."""
    name = draw(st.sampled_from(sorted(FAMILIES)))
    family = FAMILIES[name]
    vocabulary = family.model.vocab_size
    arrivals = []
    for i in range(draw(st.integers(2, 6))):
        size = draw(st.sampled_from([1, 5, 30, 31, 32, 33, 63, 64, 65, 90]))
        # Few examples: the tokens matter less than the sizes.
        prompt = np.random.default_rng(draw(st.integers(0, 3))).integers(0, vocabulary, size)
        tiers = [f"t{k}" for k in range(len(family.tiers))]
        request = PromptRequest(
            f"r{i}",
            SamplingParams(max_tokens=draw(st.integers(1, 12)), end_id=5),
            token_ids=prompt.tolist(),
            tier=draw(st.sampled_from(tiers)),
            priority=i % 2,
        )
        switches = draw(st.lists(st.tuples(st.integers(0, 9), st.sampled_from(tiers)), max_size=2))
        cancelled = draw(st.sampled_from([None, None, None, 1, 6]))
        arrivals.append(Arrival(request, draw(st.integers(0, 8)), cancelled, tuple(switches)))
    longest = max(len(a.request.token_ids) + a.request.params.max_tokens - 1 for a in arrivals)
    smallest_arena = -(-longest // BLOCK_SIZE) * sum(family.groups_per_segment)
    limits = EngineLimits(
        max_num_seqs=draw(st.integers(1, 6)),
        max_num_batched_tokens=draw(st.sampled_from(CHUNKS)),
        max_model_len=MAX_MODEL_LEN,
    )
    slack = draw(st.sampled_from([0, 1, 4, 100]))  # little slack forces preemption
    num_feature_slots = BLOCK_SIZE * draw(st.sampled_from([0, 3, 40]))
    return name, arrivals, (1 + smallest_arena + slack, num_feature_slots), limits


def check_law(plans: dict[str, OpenVinoPlans], workload) -> int:
    """Returns the number of requests that part from their lone run at an argmax tie."""
    name, arrivals, sizes, limits = workload
    served = run_together(plans[name].engine(*sizes, limits), arrivals)
    model = plans[name].reference
    ties = 0
    for arrival in arrivals:
        request = arrival.request
        if request.request_id not in served:
            continue
        got = served[request.request_id]
        alone = tokens_alone(model, request.token_ids, request.params, got.tiers)
        if got.token_ids == alone:
            continue
        pairs = zip(got.token_ids, alone, strict=False)
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        assert first is not None, f"{request.request_id}: {got.token_ids} together, {alone} alone"
        text = [*request.token_ids, *alone[:first]]
        logits = logits_alone(model, text, got.tiers[first])
        assert num_ties(logits, np.array(got.token_ids[first : first + 1])) == 1
        ties += 1
    return ties


def check_examples(plans: dict[str, OpenVinoPlans], max_examples: int) -> None:
    ties = 0

    @settings(max_examples=max_examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(workloads())
    def law(workload):
        nonlocal ties
        ties += check_law(plans, workload)

    law()
    print(f"argmax ties: {ties} in {max_examples} examples")
    assert ties <= max(1, max_examples // 100), f"{ties} argmax ties in {max_examples} examples"


def test_every_request_gets_the_tokens_it_gets_alone(plans):
    check_examples(plans, 60)


@pytest.mark.slow
def test_every_request_gets_the_tokens_it_gets_alone_at_length(plans):
    check_examples(plans, 500)
