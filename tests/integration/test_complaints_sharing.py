"""What people complained of in prefix caches and speculation, on the real server."""

import numpy as np
import pytest

from probes import metric, wait_until
from streams import Stream

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


@pytest.mark.parametrize("chain", (["small"], ["medium"], ["small", "medium"]), ids=str)
def test_row_37_greedy_text_with_drafts_is_the_text_without(server, chain):
    """Rows 37 and 41: verification differs from decoding; log-probabilities wrong or missing."""
    plain = ask(server, tier="large")
    drafted = ask(server, tier="large", draft_tier=chain, num_speculative_tokens=3)
    assert plain.values("output_ids") == drafted.values("output_ids")
    np.testing.assert_allclose(
        plain.values("output_log_probs"), drafted.values("output_log_probs"), atol=2e-4
    )
    assert number(drafted, "total_draft_tokens") > 0
    rate = number(drafted, "total_accepted_draft_tokens") / number(drafted, "total_draft_tokens")
    assert number(drafted, "acceptance_rate") == pytest.approx(rate)


def test_row_39_each_request_of_a_batch_is_verified_by_its_own_parameters(server):
    """Rows 39 and 42: parameters leak between requests; bans and penalties break."""
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


def test_a_running_request_moves_to_another_tier(slow_server):
    slow_server.set("step_delay_s", "0.03")
    asked = {
        "text_input": SENTENCE, "max_tokens": 30, "ignore_eos": True, "stream": True,
        "tier": "small",
    }  # fmt: skip
    running = Stream(
        slow_server.grpc_port, asked, request_id="moving", outputs=("text_output", "tier_used")
    ).wait_first()
    control = {"text_input": "", "max_tokens": 1, "switch_tier": "large"}
    assert Stream(slow_server.grpc_port, control, request_id="moving").finish().error is None
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
