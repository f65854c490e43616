"""Stages, learning rate and λ of each step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mfs_trt.precipitation.schedule import learning_rate, stage_at, stages, tier_weights
from trainings import training_config


@given(st.integers(2, 6), st.integers(10, 500))
def test_stages_cover_every_step_once_and_reach_down_one_tier_at_a_time(num_tiers, num_steps):
    found = stages("stepwise", num_tiers, num_steps)
    assert len(found) == max(1, num_tiers - 1)
    assert [s for stage in found for s in range(stage.first_step, stage.last_step)] == list(
        range(num_steps)
    )
    assert [stage.lowest_tier for stage in found] == list(range(num_tiers - 2, -1, -1))


def test_joint_training_has_one_stage_with_all_tiers():
    (stage,) = stages("joint", 4, 100)
    assert (stage.first_step, stage.last_step, stage.lowest_tier) == (0, 100, 0)


def test_learning_rate_falls_by_half_a_cosine_in_each_stage():
    config = training_config(num_steps=200, learning_rate=1.0)
    found = stages("stepwise", 3, 200)
    rates = [learning_rate(config, stage_at(found, s), s) for s in range(200)]
    assert rates[0] == rates[100] == 1.0
    assert rates[50] == pytest.approx(0.5) and rates[99] < 0.001
    assert rates[:100] == sorted(rates[:100], reverse=True)


def test_warm_up_rises_to_the_full_rate():
    config = training_config(num_steps=100, learning_rate=1.0, warmup_steps=10)
    (stage,) = stages("joint", 3, 100)
    rates = [learning_rate(config, stage, s) for s in range(11)]
    assert rates[0] == pytest.approx(0.1) and rates[10] == pytest.approx(1.0)
    assert rates == sorted(rates)


def test_tiers_below_the_stage_have_no_weight():
    config = training_config(num_steps=100, tier_weight=0.5)
    first, second = stages("stepwise", 3, 100)
    ones = [1.0, 1.0, 1.0]
    assert tier_weights(config, first, 0, 3, ones) == [0.0, 0.5, 1.0]
    assert tier_weights(config, second, 60, 3, ones) == [0.5, 0.5, 1.0]


def test_ramp_grows_the_weight_of_the_tier_that_the_stage_adds():
    config = training_config(num_steps=100, balance="ramp")
    _, second = stages("stepwise", 3, 100)
    weights = [tier_weights(config, second, s, 3, [1.0] * 3) for s in range(50, 100)]
    assert [w[0] for w in weights] == pytest.approx([(i + 1) / 50 for i in range(50)])
    assert {w[1] for w in weights} == {1.0}


def test_measured_balances_scale_lambda_only_when_asked_for():
    (stage,) = stages("joint", 3, 10)
    measured = [0.25, 2.0, 1.0]
    assert tier_weights(training_config(), stage, 0, 3, measured) == [1.0, 1.0, 1.0]
    config = training_config(balance="gradient_norm")
    assert tier_weights(config, stage, 0, 3, measured) == [0.25, 2.0, 1.0]
