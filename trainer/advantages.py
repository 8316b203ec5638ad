"""Advantage estimators: rewards of one group → one advantage for each of its episodes. [G] is episodes of a group."""

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

EPSILON = 1e-6


class AdvantageEstimator(Protocol):
    """An estimator that looks at one group at a time."""

    def __call__(self, rewards_G: Array, *, scale_by_std: bool) -> Array: ...


def group_relative(rewards_G: Array, *, scale_by_std: bool) -> Array:
    """Group-relative advantages of G sibling rollouts.

        A_i = r_i - mean(r)                      Dr. GRPO, arXiv:2503.20783
        A_i = (r_i - mean(r)) / (std(r) + eps)   GRPO, arXiv:2402.03300; std is the sample's (G - 1)

    Args: rewards_G: [G] one scalar for each rollout, G >= 2.
    """
    if len(rewards_G) < 2:
        raise ValueError(f"a group-relative advantage needs at least 2 rollouts in a group, got {len(rewards_G)}")
    centred_G: Array = rewards_G - rewards_G.mean()
    return centred_G / (rewards_G.std(ddof=1) + EPSILON) if scale_by_std else centred_G


ADVANTAGE_ESTIMATORS: Mapping[str, AdvantageEstimator] = {"grpo": group_relative}
