"""The training loop: what a step changes, what resuming needs, what it refuses."""

import contextlib
import math

import pytest
import torch

from mfs_trt.errors import ConfigError, TrainingError
from mfs_trt.model.sequences import boundaries
from mfs_trt.precipitation.checkpoints import Checkpoints
from mfs_trt.precipitation.initial import freeze_untrained
from mfs_trt.precipitation.trainer import Trainer
from trainings import (
    ALONE,
    random_tokens,
    tiny_trainer,
    trainable_model,
    training_config,
)


def _losses(trainer: Trainer, folder, until: int | None = None) -> list[dict[str, float]]:
    found = []

    def on_step(report):
        found.append(report.losses)
        if report.step == until:
            raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        trainer.run(Checkpoints(folder, trainer.config, "family"), on_step)
    return found


def _same(a: list[dict[str, float]], b: list[dict[str, float]]) -> bool:
    return [list(map(repr, x.values())) for x in a] == [list(map(repr, x.values())) for x in b]


def test_training_lowers_the_loss_of_every_tier(tmp_path):
    trainer = tiny_trainer(num_steps=30, schedule="joint")
    losses = _losses(trainer, tmp_path)
    assert all(losses[-1][t] < losses[0][t] - 0.1 for t in ("t0", "t1", "t2"))


def test_a_resumed_training_repeats_the_losses_bit_by_bit(tmp_path):
    whole = _losses(tiny_trainer(), tmp_path / "whole")
    before = _losses(tiny_trainer(), tmp_path / "cut", until=5)
    after = _losses(tiny_trainer(trainable_model(seed=9)), tmp_path / "cut")
    assert len(whole) == 6 and _same(before, whole[:5])
    assert _same(after, whole[4:])  # the checkpoint before the interruption is that of step 4


def test_resuming_with_other_settings_names_them(tmp_path):
    _losses(tiny_trainer(), tmp_path, until=3)
    other = tiny_trainer(learning_rate=0.5)
    with pytest.raises(TrainingError, match="learning_rate was 0.01, is 0.5"):
        other.run(Checkpoints(tmp_path, other.config, "family"), lambda report: None)


def test_only_the_last_two_checkpoints_are_kept(tmp_path):
    _losses(tiny_trainer(num_steps=8), tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-6", "step-8"]


def test_micro_batches_do_not_change_the_step():
    one, two = (tiny_trainer(micro_batch_size=size, schedule="joint") for size in (4, 1))
    a, b = one.step(), two.step()
    assert a.losses == pytest.approx(b.losses, rel=1e-5)
    for name, parameter in one.parameters.items():
        torch.testing.assert_close(parameter, two.parameters[name], rtol=1e-4, atol=1e-6)


def test_a_loss_that_is_not_finite_stops_with_the_last_good_checkpoint(tmp_path):
    trainer = tiny_trainer()
    checkpoints = Checkpoints(tmp_path, trainer.config, "family")

    def poison(report):
        if report.step == 3:
            with torch.no_grad():
                trainer.model.layers[0].mlp.up_proj.weight[0, 0] = math.nan

    with pytest.raises(TrainingError, match=r"step 4: .* not finite; .*step-2"):
        trainer.run(checkpoints, poison)


def test_stepwise_training_reaches_lower_tiers_only_in_later_stages(tmp_path):
    losses = _losses(tiny_trainer(), tmp_path)
    assert [math.isnan(loss["t0"]) for loss in losses] == [True] * 3 + [False] * 3


def test_held_out_loss_is_measured_when_due_and_at_the_end(tmp_path):
    config = training_config(num_steps=4)
    held_out = random_tokens(count=100, seed=5)
    trainer = Trainer(trainable_model(), random_tokens(), config, ALONE, held_out=held_out)
    reports = []
    trainer.run(Checkpoints(tmp_path, config, "family"), reports.append)
    assert [bool(r.held_out) for r in reports] == [False, False, True, True]
    assert set(reports[-1].held_out) == {"t0", "t1", "t2"}


def test_the_anchor_keeps_the_top_tier_near_what_it_was():
    batch = random_tokens().batch(0, 4)[0]

    def moved(anchor_weight: float) -> float:
        model, original = trainable_model(), trainable_model().requires_grad_(False)
        config = training_config(
            schedule="joint", num_steps=40, learning_rate=1e-3, anchor_weight=anchor_weight
        )
        trainer = Trainer(model, random_tokens(), config, ALONE, anchor=original)
        for _ in range(40):
            trainer.step()
        with torch.no_grad():
            a, b = (
                m.exit_logits(2, boundaries(m, batch)[-1].flatten(0, 1)).log_softmax(-1)
                for m in (original, model)
            )
        return float((a.exp() * (a - b)).sum(-1).mean())

    assert moved(20.0) < 0.25 * moved(0.0)


def test_exits_alone_leave_every_layer_as_it_was():
    model = trainable_model()
    before = {n: p.clone() for n, p in model.named_parameters()}
    config = training_config(trains="exits", schedule="joint")
    freeze_untrained(model, config)
    Trainer(model, random_tokens(), config, ALONE).step()
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert changed == {"exits.1.norm.weight", "exits.2.norm.weight"}


def test_a_shared_exit_norm_is_one_gain():
    model = trainable_model()
    config = training_config(shares_exit_norm=True, schedule="joint")
    freeze_untrained(model, config)
    Trainer(model, random_tokens(), config, ALONE).step()
    state = model.state_dict()
    gains = [state[f"exits.{n}.norm.weight"] for n in (1, 2, 4)]
    assert torch.equal(gains[0], gains[1]) and torch.equal(gains[1], gains[2])


def test_gradient_norms_balance_lambda():
    trainer = tiny_trainer(schedule="joint", balance="gradient_norm")
    report = trainer.step()
    assert report.tier_weights["t2"] == 1.0
    assert report.tier_weights["t0"] != 1.0 and report.tier_weights["t0"] > 0


def test_a_batch_that_micro_batches_do_not_divide_is_refused():
    with pytest.raises(ConfigError, match="batch_size: expected a multiple"):
        tiny_trainer(micro_batch_size=3)
