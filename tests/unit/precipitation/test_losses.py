"""The losses themselves, against their definitions differentiated by torch."""

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mfs_trt.precipitation.losses import exit_loss, exit_losses, soft_targets
from trainings import training_config


def _logits(seed: int, rows: int = 5, vocab: int = 11) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)).double()


def _divergence(student: Tensor, teacher: Tensor, temperature: float, top_n: int) -> Tensor:
    """Of Hinton et al.: with `top_n` the teacher is its first tokens, renormalised."""
    log_q = F.log_softmax(student / temperature, -1)
    scaled = teacher / temperature
    if top_n:
        scaled, tokens = scaled.topk(top_n)
        log_q = log_q.gather(-1, tokens)
    wanted = F.kl_div(log_q, F.log_softmax(scaled, -1), log_target=True, reduction="sum")
    return temperature**2 * wanted


@settings(max_examples=50, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(1, 9),
    st.sampled_from([0.0, 0.4, 1.0]),
    st.sampled_from([0.0, 0.6, 3.0]),
    st.sampled_from([1.0, 2.5]),
    st.sampled_from([0, 1, 4, 11]),
)
def test_loss_and_gradient_are_those_of_the_definition(
    seed, rows, data_weight, target_weight, temperature, top_n
):
    student = _logits(seed, rows).requires_grad_()
    teacher, labels = _logits(seed + 1, rows), torch.arange(rows)
    expected = data_weight * F.cross_entropy(student, labels, reduction="sum")
    expected = expected + target_weight * _divergence(student, teacher, temperature, top_n)
    targets = soft_targets(teacher, temperature, top_n)
    loss = exit_loss(student, labels, data_weight, targets, target_weight)
    torch.testing.assert_close(loss, expected)
    found = torch.autograd.grad(2 * loss, student)
    torch.testing.assert_close(found, torch.autograd.grad(2 * expected, student))


def test_half_precision_logits_are_judged_in_fp32():
    logits, labels = _logits(0, vocab=300).bfloat16().requires_grad_(), torch.arange(5)
    expected = F.cross_entropy(logits.float(), labels, reduction="sum")
    loss = exit_loss(logits, labels)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    (found,) = torch.autograd.grad(loss, logits)
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close((found,), torch.autograd.grad(expected, logits))


def test_a_low_tiers_distillation_does_not_pull_the_top_tier():
    low, top = _logits(0).requires_grad_(), _logits(1).requires_grad_()
    losses = exit_losses(training_config(distill_weight=1.0), [low, top], torch.arange(5))
    losses[0].backward()
    assert not top.grad.any() and low.grad.abs().sum() > 0


def test_a_low_tiers_loss_is_shared_between_data_and_top_tier():
    config = training_config(distill_weight=0.25)
    low, top, labels = _logits(0), _logits(1), torch.arange(5)
    expected = 0.75 * F.cross_entropy(low, labels, reduction="sum")
    expected = expected + 0.25 * _divergence(low, top, 1.0, 0)
    losses = exit_losses(config, [low, top], labels)
    torch.testing.assert_close(losses[0], expected)
    torch.testing.assert_close(losses[1], F.cross_entropy(top, labels, reduction="sum"))


def test_the_anchor_holds_the_top_tier_only():
    config = training_config(anchor_weight=3.0)
    low, top, anchor, labels = _logits(0), _logits(1), _logits(2), torch.arange(5)
    without = exit_losses(config, [low, top], labels)
    held = exit_losses(config, [low, top], labels, anchor)
    assert held[0] == without[0]
    torch.testing.assert_close(held[1] - without[1], 3 * _divergence(top, anchor, 1.0, 0))
