"""Sampled with speculation, texts follow the law of the tier that was asked for, exactly.

χ² tests of the first three tokens against probabilities computed from the model itself. Seeds are
fixed. Each test would reject a right sampler with probability 1e-4.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
from scipy.stats import chi2

from alone import logits_alone
from mfs_trt.request import PromptRequest
from mfs_trt.sampling.sampler import SamplingRow, filtered_distribution
from mfs_trt.sampling_params import SamplingParams
from mfs_trt.serving.core import EngineCore
from tiny import drain, submit, tiny_engine, tiny_family, tiny_model

VOCAB, LENGTH, FALSE_ALARM = 5, 3, 1e-4
NUM_TEXTS = 3072
PROMPT = [1, 3, 0, 2]
MODEL = tiny_model(tiny_family((1, 2, 4), vocab_size=VOCAB), seed=3)

PARAMS = {
    "temperature": {"temperature": 0.8},
    "top-k": {"top_k": 3},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.15, "temperature": 1.3},
    "penalties": {"temperature": 1.0, "repetition_penalty": 1.5, "presence_penalty": 0.7},
    "min tokens": {"temperature": 1.5, "min_tokens": 2, "end_id": 4},
    "all": {"temperature": 0.9, "top_k": 4, "top_p": 0.95, "frequency_penalty": 0.4},
}


def exact_law(params: SamplingParams) -> dict[tuple[int, ...], float]:
    """Probability of every text of up to LENGTH tokens."""
    law: dict[tuple[int, ...], float] = {}

    def follow(text: tuple[int, ...], probability: float) -> None:
        if probability == 0:
            return
        if len(text) == LENGTH or (text and text[-1] == params.end_id):
            law[text] = probability
            return
        ends = () if params.end_id is None else (params.end_id,)
        row = SamplingRow(params, 0, PROMPT, list(text), ends)
        logits = logits_alone(MODEL, [*PROMPT, *text], "t2")[0]
        for token, p in enumerate(filtered_distribution(logits, row)):
            follow((*text, token), probability * float(p))

    follow((), 1.0)
    return law


def sampled(kinds: Sequence[dict], chain: tuple[str, ...], num_drafts: int) -> list[Counter]:
    """Texts of requests of each kind of parameters, 64 of them in a batch that mixes the kinds."""
    core = EngineCore(
        tiny_engine(MODEL, max_num_seqs=64, max_num_batched_tokens=512, num_feature_slots=2048),
        tokenizer=None,
    )
    texts: list[dict[tuple[str, int], list[int]]] = [{} for _ in kinds]
    num_drafted = 0
    for batch in range(NUM_TEXTS // 64):
        for kind, params in enumerate(kinds):
            given = SamplingParams(
                max_tokens=LENGTH, n=64 // len(kinds), seed=1000 * batch + 100 * kind, **params
            )
            request = PromptRequest(
                f"{kind} {batch}",
                given,
                token_ids=PROMPT,
                tier="t2",
                draft_tiers=chain,
                num_speculative_tokens=num_drafts,
            )
            submit(core, request)
        for event in drain(core):
            mine = texts[int(event.request_id.split()[0])]
            mine.setdefault((event.request_id, event.sequence_index), []).extend(event.token_ids)
            num_drafted += event.num_draft_tokens
    assert bool(num_drafted) == bool(chain)
    return [Counter(map(tuple, mine.values())) for mine in texts]


def p_value(found: Counter, law: dict[tuple[int, ...], float]) -> float:
    """Of Pearson's test; cells with fewer than five expected texts are taken together."""
    total = sum(found.values())
    assert set(found) <= set(law), "a text that cannot be"
    large = [text for text, p in law.items() if p * total >= 5]
    expected = np.array([law[t] * total for t in large])
    observed = np.array([found[t] for t in large], float)
    rest = total - expected.sum()
    if rest > 1:
        expected = np.append(expected, rest)
        observed = np.append(observed, total - observed.sum())
    statistic = ((observed - expected) ** 2 / expected).sum()
    return float(chi2.sf(statistic, len(expected) - 1))


@pytest.mark.parametrize("name", PARAMS)
def test_row_38_one_level_of_drafts_keeps_the_law(name):
    """Row 38: what the drafts were drawn from is not used in rejecting them."""
    params = SamplingParams(max_tokens=LENGTH, **PARAMS[name])
    (found,) = sampled([PARAMS[name]], ("t0",), 2)
    assert p_value(found, exact_law(params)) > FALSE_ALARM


@pytest.mark.parametrize("name", ["temperature", "all"])
def test_row_38_two_levels_of_drafts_keep_the_law(name):
    """Row 38: what the drafts were drawn from is not used in rejecting them."""
    params = SamplingParams(max_tokens=LENGTH, **PARAMS[name])
    (found,) = sampled([PARAMS[name]], ("t0", "t1"), 1)
    assert p_value(found, exact_law(params)) > FALSE_ALARM


def test_row_39_requests_of_one_batch_each_keep_the_law_of_their_own_parameters():
    """Row 39: verification uses the parameters of another request, or fixed ones."""
    kinds = [PARAMS["temperature"], PARAMS["top-k"], PARAMS["min-p"], PARAMS["penalties"]]
    laws = [exact_law(SamplingParams(max_tokens=LENGTH, **params)) for params in kinds]
    found = sampled(kinds, ("t0",), 2)
    for mine, law in zip(found, laws, strict=True):
        assert p_value(mine, law) > FALSE_ALARM / len(kinds)
    # The test would tell them apart: no law explains another kind's texts.
    cells = {text for law in laws for text in law}
    for i, mine in enumerate(found):
        for law in laws[:i] + laws[i + 1 :]:
            whole = dict.fromkeys(cells, 0.0) | law
            assert any(whole[t] == 0 for t in mine) or p_value(mine, whole) < 1e-6


def test_the_test_tells_the_draft_tiers_law_from_the_targets():
    params = SamplingParams(max_tokens=LENGTH, temperature=0.8)
    law = exact_law(params)
    low = {
        text: np.prod(
            [
                filtered_distribution(
                    logits_alone(MODEL, [*PROMPT, *text[:i]], "t0")[0],
                    SamplingRow(params, 0, PROMPT, list(text[:i])),
                )[text[i]]
                for i in range(LENGTH)
            ]
        )
        for text in product(range(VOCAB), repeat=LENGTH)
    }
    rng = np.random.default_rng(0)
    texts = list(low)
    weights = np.array(list(low.values()))
    drawn = rng.choice(len(texts), NUM_TEXTS, p=weights / weights.sum())
    assert p_value(Counter(texts[i] for i in drawn), law) < 1e-12
