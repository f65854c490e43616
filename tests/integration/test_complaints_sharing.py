"""What people complained of in prefix caches, scarce memory and speculation, on the real server."""

import numpy as np
import pytest

from mfs_trt.sampling_params import SamplingParams
from probes import is_ready, metric, post, total, used_frames, wait_until
from streams import Burst, Stream

pytestmark = pytest.mark.triton

SENTENCE = "the river moves past the old mill and the quiet fields. "
OUTPUTS = (
    "text_output", "output_ids", "output_log_probs", "tier_used", "kv_cache_reused_blocks",
    "acceptance_rate", "total_draft_tokens", "total_accepted_draft_tokens",
)  # fmt: skip


def ask(server, prompt: str = SENTENCE * 3, **fields) -> Stream:
    asked = {
        "text_input": prompt, "max_tokens": 12, "ignore_eos": True, "return_perf_metrics": True,
        "return_log_probs": True, "exclude_input_in_output": True, **fields,
    }  # fmt: skip
    done = Stream(server.grpc_port, asked, model="family", outputs=OUTPUTS).finish()
    assert done.error is None, done.error
    return done


def number(done: Stream, name: str) -> float:
    return float(done.results[-1].as_numpy(name).item())


def test_row_31_reused_blocks_are_told_per_request_and_counted(server):
    """Row 31: cannot tell whether reuse works."""
    cold = ask(server, cache_salt="row 31", tier="large")
    warm = ask(server, cache_salt="row 31", tier="large")
    assert number(cold, "kv_cache_reused_blocks") == 0
    reused = number(warm, "kv_cache_reused_blocks")
    assert reused > 0 and reused % 3 == 0  # the same blocks in each of three segments
    wait_until(lambda: metric(server, "mfs_reused_tokens_total", segment="0") > 0)


@pytest.mark.parametrize("tier", ("small", "medium", "large"))
def test_row_28_reuse_changes_neither_tokens_nor_log_probabilities(server, tier):
    """Row 28: reuse changes the first token's logits."""
    cold = ask(server, tier=tier, reuse_prefix=False)
    ask(server, tier="large")
    warm = ask(server, tier=tier)
    assert number(warm, "kv_cache_reused_blocks") > 0
    assert cold.values("output_ids") == warm.values("output_ids")
    np.testing.assert_allclose(
        cold.values("output_log_probs"), warm.values("output_log_probs"), atol=2e-4
    )


@pytest.mark.parametrize("num_words", range(1, 24, 3))
def test_row_29_shared_prefixes_of_any_length_give_the_tokens_of_no_reuse(server, num_words):
    """Row 29: reuse gives tokens out of range."""
    prompt = " ".join((SENTENCE * 3).split()[:num_words])
    ask(server)
    cold, warm = ask(server, prompt, reuse_prefix=False), ask(server, prompt)
    assert cold.values("output_ids") == warm.values("output_ids")


def test_row_26_a_salt_keeps_content_apart(server):
    """Row 26: salts and adapters collide."""
    ask(server, cache_salt="mine")
    other = ask(server, cache_salt="yours")
    assert number(other, "kv_cache_reused_blocks") == 0
    assert number(ask(server, cache_salt="mine"), "kv_cache_reused_blocks") > 0


# -- more requests than memory -------------------------------------------------------------------

CROWD = [
    {
        "text_input": f"{i % 2} {SENTENCE}", "max_tokens": 80, "ignore_eos": True, "tier": "large",
        "reuse_prefix": False,
    }
    for i in range(7)
]  # fmt: skip


@pytest.fixture(scope="module")
def crowd_texts(_slow_server) -> list[str]:
    """What each of `CROWD` gets alone."""
    params = SamplingParams(max_tokens=80, ignore_eos=True)
    prompts = [fields["text_input"] for fields in CROWD[:2]]
    texts = [_slow_server.offline.generate(p, params, tier="large")[0] for p in prompts]
    return [texts[i % 2].outputs[0].text for i in range(len(CROWD))]


def serve_crowd(slow_server, texts: list[str], **fields) -> tuple[float, float]:
    """All of them end with their texts; returns preemptions, and rows of segment 0 per useful one.

    Each fits, all together do not.
    """
    slow_server.clear("step_delay_s")
    needed = [slow_server.expected_frames(asked) for asked in CROWD]
    assert all(n <= available for n, available in needed)
    assert sum(n for n, _ in needed) > 1.3 * needed[0][1]
    names = (("mfs_preemptions_total", {}), ("mfs_rows_total", {"segment": "0"}))
    before = [total(slow_server, name, **labels) for name, labels in names]
    burst = Burst(slow_server.grpc_port, [{**asked, **fields} for asked in CROWD]).finish()
    assert burst.errors == []
    assert [burst.texts[i] for i in range(len(CROWD))] == texts
    wait_until(lambda: used_frames(slow_server) == 0)
    after = [total(slow_server, name, **labels) for name, labels in names]
    encode = slow_server.offline.tokenizer.encode
    useful = sum(len(encode(f["text_input"])) + f["max_tokens"] - 1 for f in CROWD)
    return after[0] - before[0], (after[1] - before[1]) / useful


def test_row_35_more_requests_than_memory_all_end_and_little_is_computed_again(
    slow_server, crowd_texts
):
    """Row 35: preemptions thrash, most work is done again."""
    num_preemptions, rows_per_useful_row = serve_crowd(slow_server, crowd_texts)
    assert num_preemptions > 0
    assert 1 < rows_per_useful_row < 2


def test_row_36_drafts_in_too_little_memory_abort_nothing(slow_server, crowd_texts):
    """Row 36: drafts' memory is not counted in admission, and its exhaustion aborts."""
    drafts = {"draft_tier": ["small", "medium"], "num_speculative_tokens": 2}
    num_drafts = total(slow_server, "mfs_draft_tokens_total")
    num_preemptions, _ = serve_crowd(slow_server, crowd_texts, **drafts)
    assert num_preemptions > 0
    assert total(slow_server, "mfs_draft_tokens_total") > num_drafts


# -- drafts --------------------------------------------------------------------------------------

CHAINS = (["small"], ["medium"], ["small", "medium"])


@pytest.mark.parametrize("chain", CHAINS, ids=str)
def test_row_37_greedy_text_with_drafts_is_the_text_without(server, chain):
    """Row 37: verification differs from decoding one token at a time."""
    plain = ask(server, tier="large")
    drafted = ask(server, tier="large", draft_tier=chain, num_speculative_tokens=3)
    assert plain.values("output_ids") == drafted.values("output_ids")


@pytest.mark.parametrize("chain", CHAINS, ids=str)
def test_row_41_log_probs_with_drafts_are_those_without_and_drafts_are_counted(server, chain):
    """Row 41: log-probabilities are wrong with speculation; or it is off, and nobody says so."""
    plain = ask(server, tier="large")
    drafted = ask(server, tier="large", draft_tier=chain, num_speculative_tokens=3)
    np.testing.assert_allclose(
        plain.values("output_log_probs"), drafted.values("output_log_probs"), atol=2e-4
    )
    assert max(drafted.values("output_log_probs")) < 0
    assert number(drafted, "total_draft_tokens") > 0
    rate = number(drafted, "total_accepted_draft_tokens") / number(drafted, "total_draft_tokens")
    assert number(drafted, "acceptance_rate") == pytest.approx(rate)


def test_row_39_each_request_of_a_batch_is_verified_by_its_own_parameters(server):
    """Row 39: verification uses the parameters of another request, or fixed ones.

    That each keeps the law of its own: `test_speculation_law`.
    """
    asked = [
        {"repetition_penalty": 1.5},
        {"bad_words": ["the"]},
        {"min_tokens": 12, "ignore_eos": False},
        {},
    ]
    plain = [ask(server, tier="large", **fields).values("output_ids") for fields in asked]
    streams = [
        Stream(
            server.grpc_port,
            {
                "text_input": SENTENCE * 3, "max_tokens": 12, "ignore_eos": True, "tier": "large",
                "draft_tier": ["small"], "num_speculative_tokens": 2, "stream": True,
                "exclude_input_in_output": True, **fields,
            },
            model="family",
            outputs=("output_ids",),
        )
        for fields in asked
    ]  # fmt: skip
    drafted = [stream.finish() for stream in streams]
    assert [d.error for d in drafted] == [None] * 4
    assert [d.values("output_ids") for d in drafted] == plain


@pytest.mark.parametrize("chain", CHAINS, ids=str)
def test_row_42_bans_penalties_and_min_tokens_hold_on_tokens_that_were_drafted(server, chain):
    """Row 42: what looks at the text so far breaks when drafts are rejected."""
    free = ask(server, tier="large").values("output_ids")
    for fields in (
        {"bad_words_list": np.array([[free[:1], [1]]], np.int32)},  # that token
        {"repetition_penalty": 1.5, "frequency_penalty": 0.7, "presence_penalty": 0.3},
        {"min_tokens": 9, "end_id": free[2], "ignore_eos": False},
    ):
        plain = ask(server, tier="large", **fields).values("output_ids")
        drafted = ask(
            server, tier="large", draft_tier=chain, num_speculative_tokens=3, **fields
        ).values("output_ids")
        assert drafted == plain
        if "bad_words_list" in fields:
            assert free[0] not in drafted
        if "min_tokens" in fields:
            assert free[2] not in drafted[:8]


def test_row_40_a_seed_gives_the_same_text_alone_and_among_others_of_any_tier(server):
    """Row 40: random numbers are shared over the batch."""
    mine = [
        {"tier": tier, "temperature": 1.5, "top_p": 0.95, "seed": 7, "text_input": SENTENCE}
        for tier in ("small", "medium", "large")
    ]
    others = [
        {"tier": "large", "temperature": 1.5, "seed": 7, "text_input": f"{SENTENCE} again"},
        {"tier": "small", "text_input": SENTENCE},
        {"tier": "medium", "temperature": 2.0, "seed": 1, "text_input": SENTENCE * 5},
        {"tier": "large", "draft_tier": ["small"], "temperature": 1.0, "seed": 7,
         "text_input": SENTENCE},
    ]  # fmt: skip
    length = {"max_tokens": 24, "ignore_eos": True}
    alone = []
    for fields in mine:
        burst = Burst(server.grpc_port, [{**fields, **length}]).finish()
        assert burst.errors == []
        alone.append(burst.texts[0])
    together = Burst(
        server.grpc_port, [{**fields, **length} for fields in (*others, *mine, *others, *mine)]
    ).finish()
    assert together.errors == []
    first, again = len(others), 2 * len(others) + len(mine)
    for start in (first, again):
        assert [together.texts[start + i] for i in range(len(mine))] == alone
    assert len(set(alone)) == len(alone)


@pytest.mark.parametrize("model", ("ensemble", "tensorrt_llm_bls", "family"))
def test_row_43_context_logits_with_drafts_are_refused_by_name_and_nothing_breaks(server, model):
    """Row 43: log-probabilities of the prompt together with speculation crash the server."""
    expected = ask(server, tier="large").values("output_ids")
    drafting = {
        "text_input": SENTENCE * 3, "max_tokens": 12, "ignore_eos": True, "tier": "large",
        "draft_tier": ["small", "medium"], "num_speculative_tokens": 3, "stream": True,
        "return_log_probs": True, "return_generation_logits": True,
    }  # fmt: skip
    outputs = ("text_output", "output_log_probs", "generation_logits", "context_logits")
    running = Stream(server.grpc_port, drafting, model=model, outputs=outputs)
    refused = Stream(
        server.grpc_port, {**drafting, "return_context_logits": True}, model=model, outputs=outputs
    ).finish()
    assert "UnsupportedFieldError: return_context_logits" in refused.error
    body = {k: v for k, v in drafting.items() if not k.startswith("return")}
    status, text = post(server, f"{model}/generate_stream", {**body, "return_context_logits": True})
    assert status == 400 and "return_context_logits" in text
    done = running.finish()  # what shared the engine with it, and asked for the other logits
    assert done.error is None
    assert len(done.values("output_log_probs")) == 12
    assert not done.values("context_logits")
    logits = [r.as_numpy("generation_logits")[0, 0] for r in done.results]
    assert np.concatenate(logits).argmax(-1).tolist() == expected
    assert ask(server, tier="large", draft_tier=["small"]).values("output_ids") == expected
    assert is_ready(server)


# -- tiers ---------------------------------------------------------------------------------------


def test_a_running_request_moves_to_another_tier(slow_server):
    slow_server.set("hold")
    asked = {
        "text_input": SENTENCE, "max_tokens": 30, "ignore_eos": True, "stream": True,
        "tier": "small",
    }  # fmt: skip
    running = Stream(
        slow_server.grpc_port, asked, request_id="moving", outputs=("text_output", "tier_used")
    )
    slow_server.step_until(lambda: running.results)
    control = {"text_input": "", "max_tokens": 1, "switch_tier": "large"}
    assert Stream(slow_server.grpc_port, control, request_id="moving").finish().error is None
    slow_server.clear("hold")
    done = running.finish()
    tiers = [t.decode() for t in done.values("tier_used")]
    assert done.error is None and tiers[0] == "small" and tiers[-1] == "large"
    assert tiers == sorted(tiers, reverse=True)  # once, from small to large


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tier": "small", "draft_tier": ["large"]}, "draft_tier: expected tiers below 'small'"),
        ({"draft_tier": ["nobody"]}, "nobody"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens: expected at least 0, got -1"),
        ({"switch_tier": "nobody"}, "nobody"),
    ],
    ids=str,
)
def test_wrong_tiers_are_named(server, fields, named):
    asked = {"text_input": "x", "max_tokens": 2, **fields}
    assert named in Stream(server.grpc_port, asked, request_id="wrong").finish().error
