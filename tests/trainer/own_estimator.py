"""An estimator as a user would write it, named in tests by import path."""

import numpy as np
from torch import Tensor

from shared.advantage_settings import AdvantageSection
from trainer.advantages import AdvantageEstimator, by_group, rewards
from trainer.group_advantages import Array
from trainer.token_advantages import TokenAdvantages

NOT_ONE = 3


def best_of_group(rewards_G: Array, settings: AdvantageSection) -> Array:
    """1 for the best rollouts of a group, 0 for the others."""
    return (rewards_G == np.max(rewards_G)).astype(float)


def mean_of_group(rewards_G: Array, settings: AdvantageSection) -> Array:
    """One number for all, where each episode should have one."""
    return np.array([rewards_G.mean()])


def total(rewards_BT: Tensor, values_BT: Tensor | None, mask_BT: Tensor, settings: AdvantageSection) -> TokenAdvantages:
    """One number for each sequence, where each token should have one."""
    return TokenAdvantages(rewards_BT.sum(dim=1), rewards_BT.sum(dim=1))


best = AdvantageEstimator(by_group(best_of_group), min_group_size=2)
too_few = AdvantageEstimator(by_group(mean_of_group), min_group_size=2)
of_sequences = AdvantageEstimator(rewards, total)
