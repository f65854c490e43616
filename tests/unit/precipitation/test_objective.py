"""The joint objective of a nested model."""

import pytest
import torch

from mfs_trt.precipitation.objective import JointObjective
from trainings import random_tokens, trainable_model, training_config


def _gradients(weights, **settings):
    model = trainable_model()
    objective = JointObjective(model, training_config(**settings))
    total, losses = objective(*random_tokens().batch(0, 3), weights)
    total.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return float(total.detach()), losses, grads


def test_the_joint_gradient_is_the_weighted_sum_of_each_exits_own():
    total, losses, joint = _gradients([0.3, 0.6, 1.0])
    tiny = 1e-9  # the top tier always takes part
    parts = [
        _gradients([1.0, 0.0, tiny]),
        _gradients([0.0, 1.0, tiny]),
        _gradients([0.0, 0.0, 1.0]),
    ]
    assert total == pytest.approx(sum(w * p[0] for w, p in zip((0.3, 0.6, 1), parts, strict=True)))
    for name, grad in joint.items():
        expected = sum(
            w * p[2].get(name, torch.zeros_like(grad))
            for w, p in zip((0.3, 0.6, 1.0), parts, strict=True)
        )
        torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-5)


def test_a_tier_without_weight_has_no_loss_and_leaves_its_exit_alone():
    _, losses, grads = _gradients([0.0, 1.0, 1.0])
    assert losses[0].isnan() and losses[1:].isfinite().all()
    assert "exits.1.norm.weight" not in grads and "exits.2.norm.weight" in grads


def test_recomputed_layers_give_the_same_gradients():
    plain, recomputed = (_gradients([1.0] * 3, recompute_layers=r) for r in (False, True))
    assert plain[0] == recomputed[0]
    for name, grad in plain[2].items():
        torch.testing.assert_close(grad, recomputed[2][name], rtol=0, atol=0)


def test_evaluation_takes_plain_cross_entropy_whatever_training_takes():
    model = trainable_model()
    batch = random_tokens().batch(0, 2)
    plain = JointObjective(model, training_config()).eval()
    distilled = JointObjective(model, training_config(distill_weight=1.0)).eval()
    with torch.no_grad():
        assert plain(*batch, [1.0] * 3)[1].tolist() == distilled(*batch, [1.0] * 3)[1].tolist()
