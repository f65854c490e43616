import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from mfs_trt.errors import ConfigError
from mfs_trt.evaluation import held_out
from mfs_trt.evaluation.agreement import AgreementMeter
from mfs_trt.evaluation.evaluation import evaluate_model
from mfs_trt.evaluation.perplexity import LossMeter, TierLoss
from mfs_trt.model.sequences import boundaries
from mfs_trt.precipitation.documents import Document
from mfs_trt.precipitation.packing import IGNORED, PackedTokens
from tiny import tiny_family, tiny_model

FAMILY = tiny_family()


def packed(num_tokens: int = 150, seq_length: int = 16, share_trained: float = 0.7) -> PackedTokens:
    rng = np.random.default_rng(0)
    ids = rng.integers(1, 61, num_tokens).astype(np.int32)
    document = Document(ids, rng.random(num_tokens) < share_trained)
    return PackedTokens.from_documents([document], seq_length, seed=1, end_token_id=0)


@pytest.fixture(scope="module")
def model():
    return tiny_model(FAMILY)


def plain_logits(model, tokens):
    """All logits at once, [tiers, positions, vocab], and the labels of trained positions."""
    input_ids, labels = tokens.batch(0, tokens.num_sequences)
    hidden = boundaries(model, input_ids)
    rows = labels.flatten() != IGNORED
    logits = [model.exit_logits(i, h.flatten(0, 1)[rows]) for i, h in enumerate(hidden)]
    return torch.stack(logits), labels.flatten()[rows]


@pytest.mark.parametrize("chunk_nbytes", [1, 5000, 1 << 28])
@pytest.mark.parametrize("batch_size", [1, 4, 99])
def test_losses_equal_those_of_all_logits_at_once(model, monkeypatch, chunk_nbytes, batch_size):
    monkeypatch.setattr(held_out, "_CHUNK_NBYTES", chunk_nbytes)
    tokens = packed()
    found = evaluate_model(model, tokens, batch_size=batch_size)
    logits, labels = plain_logits(model, tokens)
    assert 0 < len(labels) < tokens.num_tokens - 1  # some positions are not trained
    for row, tier in zip(found.losses, logits, strict=True):
        losses = F.cross_entropy(tier, labels, reduction="none")
        assert row.loss == pytest.approx(float(losses.mean()), abs=1e-12)
        error = float(losses.std(correction=0)) / math.sqrt(len(labels))
        assert row.standard_error == pytest.approx(error, abs=1e-9)
        assert row.num_tokens == len(labels)
    assert [row.tier for row in found.losses] == ["t0", "t1", "t2"]


def test_agreement_equals_that_of_all_logits_at_once(model, monkeypatch):
    monkeypatch.setattr("mfs_trt.evaluation.agreement._LOGITS_AT_A_TIME", 200)
    tokens = packed()
    found = evaluate_model(model, tokens)
    logits, _ = plain_logits(model, tokens)
    p = logits.softmax(-1)
    assert [(pair.draft, pair.target) for pair in found.pairs] == [
        ("t0", "t1"),
        ("t0", "t2"),
        ("t1", "t2"),
    ]
    for pair, (j, k) in zip(found.pairs, [(0, 1), (0, 2), (1, 2)], strict=True):
        same = (logits[j].argmax(-1) == logits[k].argmax(-1)).double().mean()
        assert pair.greedy_agreement == pytest.approx(float(same), abs=1e-12)
        shared = torch.minimum(p[j], p[k]).sum(-1).mean()
        assert pair.acceptance == pytest.approx(float(shared), abs=1e-12)


def test_acceptance_is_the_share_of_sampled_drafts_that_stand():
    draft, target = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.3, 0.5, 0.2])
    meter = AgreementMeter(tiny_family((1, 2)))
    meter.add([draft.log()[None], target.log()[None]])
    (pair,) = meter.result()
    tokens = torch.multinomial(draft, 40_000, replacement=True)
    stands = torch.rand(40_000) < (target / draft)[tokens]
    assert pair.acceptance == pytest.approx(0.3 + 0.2 + 0.1)
    assert float(stands.double().mean()) == pytest.approx(pair.acceptance, abs=0.01)
    assert pair.greedy_agreement == 0.0


def test_only_the_pairs_asked_for_are_compared(model):
    found = evaluate_model(model, packed(), pairs=[(0, 2)])
    assert [(pair.draft, pair.target) for pair in found.pairs] == [("t0", "t2")]


def test_no_more_sequences_than_asked_for_are_read(model):
    tokens = packed(share_trained=1.1)
    found = evaluate_model(model, tokens, max_sequences=3)
    _, labels = tokens.batch(0, 3)
    assert found.losses[0].num_tokens == int((labels != IGNORED).sum())


def test_single_tier_has_losses_and_no_pairs():
    family = tiny_family((2,))
    found = evaluate_model(tiny_model(family), packed())
    assert len(found.losses) == 1
    assert found.pairs == ()


def test_data_without_a_trained_token_is_refused(model):
    with pytest.raises(ConfigError, match="held-out data"):
        evaluate_model(model, packed(share_trained=0.0))


def test_loss_meter_weighs_tokens_not_chunks():
    meter = LossMeter(tiny_family((1,)))
    certain = torch.tensor([[50.0, 0.0]])
    even = torch.zeros(3, 2)
    meter.add([certain], torch.tensor([0]))
    meter.add([even], torch.tensor([0, 1, 0]))
    assert meter.result()[0].loss == pytest.approx(0.75 * math.log(2))


def test_figures_have_names_that_gates_use(model):
    metrics = evaluate_model(model, packed()).metrics()
    assert {"loss.t0", "perplexity.t2", "agreement.t0.t1", "acceptance.t1.t2"} <= metrics.keys()
    assert metrics["perplexity.t1"] == pytest.approx(math.exp(metrics["loss.t1"]))


def test_perplexity_of_a_huge_loss_is_infinite_not_an_error():
    assert TierLoss("t", 1, 1e4, 0.0, 1).perplexity == math.inf
