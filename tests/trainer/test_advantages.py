"""Advantages by hand."""

import numpy as np
import pytest

from trainer.advantages import ADVANTAGE_ESTIMATORS, group_relative


def test_grpo_by_hand():
    advantages = group_relative(np.array([1.0, 0.0, 0.0, 1.0]), scale_by_std=True)
    std = np.sqrt(4 * 0.25 / 3)
    np.testing.assert_allclose(advantages, np.array([0.5, -0.5, -0.5, 0.5]) / (std + 1e-6), rtol=1e-5)


def test_dr_grpo_by_hand():
    np.testing.assert_allclose(group_relative(np.array([3.0, 1.0, 2.0]), scale_by_std=False), [1.0, -1.0, 0.0], rtol=1e-5)


def test_equal_rewards_teach_nothing():
    assert np.abs(group_relative(np.full(8, 0.1), scale_by_std=True)).max() < 1e-9


def test_a_group_of_one_is_refused():
    with pytest.raises(ValueError, match="at least 2 rollouts in a group, got 1"):
        group_relative(np.array([1.0]), scale_by_std=True)


def test_grpo_is_registered_under_its_configuration_name():
    assert ADVANTAGE_ESTIMATORS["grpo"] is group_relative
