"""The losses themselves, against their definitions."""

import torch
import torch.nn.functional as F

from mfs_trt.precipitation.losses import distillation, exit_losses
from trainings import training_config


def _logits(seed: int, rows: int = 5, vocab: int = 11) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)).double()


def test_distillation_is_the_divergence_from_the_teacher():
    student, teacher = _logits(0), _logits(1)
    expected = F.kl_div(
        F.log_softmax(student, -1), F.log_softmax(teacher, -1), log_target=True, reduction="sum"
    )
    torch.testing.assert_close(distillation(student, teacher), expected)


def test_temperature_softens_both_sides_and_scales_back():
    student, teacher = _logits(0), _logits(1)
    torch.testing.assert_close(
        distillation(student, teacher, temperature=2.0), 4 * distillation(student / 2, teacher / 2)
    )


def test_top_n_keeps_the_teachers_first_tokens_renormalised():
    student, teacher = _logits(0, rows=1), _logits(1, rows=1)
    tokens = teacher[0].topk(3).indices
    p = teacher[0, tokens].softmax(0)
    log_q = student[0].log_softmax(0)[tokens]
    expected = (p * (p.log() - log_q)).sum()
    torch.testing.assert_close(distillation(student, teacher, top_n=3), expected)


def test_no_gradient_reaches_the_teacher():
    student, teacher = _logits(0).requires_grad_(), _logits(1).requires_grad_()
    distillation(student, teacher).backward()
    assert teacher.grad is None and student.grad.abs().sum() > 0


def test_a_low_tiers_loss_is_shared_between_data_and_top_tier():
    config = training_config(distill_weight=0.25)
    low, top, labels = _logits(0), _logits(1), torch.arange(5)
    expected = 0.75 * F.cross_entropy(low, labels, reduction="sum") + 0.25 * distillation(low, top)
    losses = exit_losses(config, [low, top], labels)
    torch.testing.assert_close(losses[0], expected)
    torch.testing.assert_close(losses[1], F.cross_entropy(top, labels, reduction="sum"))


def test_the_anchor_holds_the_top_tier_only():
    config = training_config(anchor_weight=3.0)
    low, top, anchor, labels = _logits(0), _logits(1), _logits(2), torch.arange(5)
    without = exit_losses(config, [low, top], labels)
    held = exit_losses(config, [low, top], labels, anchor)
    assert held[0] == without[0]
    torch.testing.assert_close(held[1] - without[1], 3 * distillation(top, anchor))
