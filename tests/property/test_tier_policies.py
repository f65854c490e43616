"""The law under tier policies: each token is the one that its tier gives alone."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from alone import tokens_alone
from known_cost import KnownCost
from mfs_trt.request import PromptRequest
from mfs_trt.sampling_params import SamplingParams
from mfs_trt.scheduler.pacing import Pacing
from mfs_trt.serving.core import EngineCore
from tiny import drain, submit, tiny_engine, tiny_family, tiny_model

MODEL = tiny_model(tiny_family((2, 3, 4)))
PROMPT = [3, 1, 4, 1, 5]


def make_request(name, max_tokens, sampling, **fields) -> PromptRequest:
    params = SamplingParams(max_tokens=max_tokens, end_id=-1, **sampling)
    return PromptRequest(name, params, token_ids=PROMPT, **fields)


POLICIES = st.fixed_dictionaries(
    {
        "tier_policy": st.sampled_from(["cascade", "load", "deadline", "explicit"]),
        "min_tier": st.sampled_from(["t0", "t1"]),
        "max_tier": st.sampled_from(["t1", "t2"]),
        "deadline_s": st.sampled_from([5.0, 60.0, 1e4]),
        "max_tokens": st.integers(1, 14),
        "sampling": st.sampled_from([{}, {"temperature": 1.2, "seed": 3}]),
        "priority": st.integers(0, 1),
    }
)


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(POLICIES, min_size=1, max_size=4), st.integers(1, 3), st.sampled_from([40, 200]))
def test_under_any_policies_each_token_is_the_one_its_tier_gives_alone(wishes, seats, num_frames):
    """On an arena and with seats that make requests wait and be preempted; never out of bounds."""
    engine = tiny_engine(MODEL, num_feature_slots=40, max_num_seqs=seats, num_frames=num_frames)
    cost = KnownCost(engine.kv_spec.groups_per_segment)
    core = EngineCore(engine, None, Pacing(cost))
    made = {f"r{i}": make_request(f"r{i}", **wish) for i, wish in enumerate(wishes)}
    for one in made.values():
        submit(core, one)
    events = drain(core)
    core.scheduler.kv_cache.check_integrity()
    assert core.scheduler.kv_cache.num_used_frames == 0
    for name, one in made.items():
        mine = [e for e in events if e.request_id == name]
        tokens = [t for e in mine for t in e.token_ids]
        tiers = [e.tier for e in mine for _ in e.token_ids]
        assert tokens == tokens_alone(MODEL, PROMPT, one.params, tiers)
        assert len(tokens) == one.params.max_tokens
        assert one.min_tier <= min(tiers) and max(tiers) <= one.max_tier
        if one.tier_policy == "cascade":
            assert tiers == sorted(tiers)
