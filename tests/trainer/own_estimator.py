"""An estimator as a user would write it, named in tests by import path."""

import numpy as np

from shared.advantage_settings import AdvantageSection
from trainer.advantages import AdvantageEstimator, by_group
from trainer.group_advantages import Array

NOT_ONE = 3


def best_of_group(rewards_G: Array, settings: AdvantageSection) -> Array:
    """1 for the best rollouts of a group, 0 for the others."""
    return (rewards_G == np.max(rewards_G)).astype(float)


best = AdvantageEstimator(by_group(best_of_group), min_group_size=2)
