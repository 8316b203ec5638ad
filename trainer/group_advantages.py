"""Advantages from rewards alone: one score for each turn or episode, computed by rank 0 when it plans the batch.

Every formula is in float64. A standard deviation is the sample's (n - 1), and eps keeps a division by it finite, so that rewards
without variance give 0.

Shapes: G episodes of one group, N episodes of a batch, K turns of one episode.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

EPSILON = 1e-6


@dataclass(frozen=True)
class EpisodeRewards:
    """What there is to learn from one episode of K >= 1 turns."""

    turn_rewards: tuple[float, ...]
    """[K], for what the turn did; the last includes what the episode as a whole was scored."""
    state_fingerprints: tuple[str, ...]
    """[K], of the environment's state before the turn; "" if unknown."""

    @property
    def total(self) -> float:
        return sum(self.turn_rewards)


def group_relative(rewards_G: Array, *, scale_by_std: bool) -> Array:
    """Group-relative advantages of G sibling rollouts.

        A_i = r_i - mean(r)                      Dr. GRPO, arXiv:2503.20783
        A_i = (r_i - mean(r)) / (std(r) + eps)   GRPO, arXiv:2402.03300

    Args: rewards_G: [G] one scalar for each rollout, G >= 2.
    """
    centred_G: Array = rewards_G - group_mean(rewards_G)
    return centred_G / (rewards_G.std(ddof=1) + EPSILON) if scale_by_std else centred_G


def leave_one_out(rewards_G: Array) -> Array:
    """Each rollout against the mean of the others: RLOO, arXiv:2402.14740.

        A_i = r_i - 1/(G - 1) · Σ_{j ≠ i} r_j = G/(G - 1) · (r_i - mean(r))

    Args: rewards_G: [G], G >= 2.
    """
    num_rollouts = len(rewards_G)
    advantages_G: Array = (rewards_G - group_mean(rewards_G)) * num_rollouts / (num_rollouts - 1)
    return advantages_G


def lite_ppo(groups: Sequence[Array]) -> list[Array]:
    """A_i = (r_i - mean of its group) / (std of all rewards of the batch + eps): Lite PPO, arXiv:2508.08221.

    The batch's std does not blow up where the rewards of one group hardly differ.

    Args: groups: a [G] of rewards for each group, G >= 2.
    """
    centred = [group_relative(rewards_G, scale_by_std=False) for rewards_G in groups]
    std = np.concatenate(groups).std(ddof=1)
    return [centred_G / (std + EPSILON) for centred_G in centred]


def step_reinforce(episodes: Sequence[EpisodeRewards], *, discount: float) -> list[Array]:
    """Discounted returns by turn, normalised over all turns of the batch, each of which counts once.

        R_k = Σ_{j >= k} γ^{j - k} r_j,   A_k = (R_k - mean(R)) / (std(R) + eps)

    Returns: a [K] for each episode.
    """
    returns = [discounted_returns(np.array(episode.turn_rewards), discount=discount) for episode in episodes]
    every = np.concatenate(returns)
    std = every.std(ddof=1) if len(every) > 1 else 0.0
    return [(returns_K - every.mean()) / (std + EPSILON) for returns_K in returns]


def group_in_group(
    group: Sequence[EpisodeRewards], *, discount: float, scale_by_std: bool, episode_weight: float, step_weight: float
) -> list[Array]:
    """GiGPO: episodes against their siblings, and turns against all turns of the group that began in the same state.

        A_ik = w_e · norm(r_i | group) + w_s · norm(R_ik | turns with the state of turn k)        arXiv:2505.10978

    with R_ik the discounted return by turn, and norm that of GRPO, or of Dr. GRPO without `scale_by_std`. A turn whose state
    nothing else in the group began in, or is unknown, has nothing to be compared with: its second term is 0.

    Args: group: G >= 2 episodes. Returns: a [K] for each.
    """
    episodes_G = group_relative(np.array([episode.total for episode in group]), scale_by_std=scale_by_std)
    returns = [discounted_returns(np.array(episode.turn_rewards), discount=discount) for episode in group]
    places: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for i, episode in enumerate(group):
        for k, fingerprint in enumerate(episode.state_fingerprints):
            places[fingerprint].append((i, k))
    steps = [np.zeros_like(returns_K) for returns_K in returns]
    for fingerprint, alike in places.items():
        if fingerprint and len(alike) > 1:
            relative = group_relative(np.array([returns[i][k] for i, k in alike]), scale_by_std=scale_by_std)
            for (i, k), advantage in zip(alike, relative, strict=True):
                steps[i][k] = advantage
    return [episode_weight * advantage + step_weight * steps_K for advantage, steps_K in zip(episodes_G, steps, strict=True)]


def group_mean(rewards_G: Array) -> float:
    """The baseline of siblings. Raises: ValueError for a group of one, whose reward would otherwise pass for an advantage of 0."""
    if len(rewards_G) < 2:
        raise ValueError(f"a group-relative advantage needs at least 2 rollouts in a group, got {len(rewards_G)}")
    return float(rewards_G.mean())


def discounted_returns(rewards_K: Array, *, discount: float) -> Array:
    """R_k = r_k + γ·R_{k+1}."""
    returns_K = np.array(rewards_K, dtype=np.float64)
    for k in range(len(returns_K) - 2, -1, -1):
        returns_K[k] += discount * returns_K[k + 1]
    return returns_K


def overlong_penalty(num_sampled_tokens: int, *, max_tokens: int, buffer_tokens: int, penalty: float) -> float:
    """What is added to the reward of an episode that comes close to the length limit: DAPO's soft punishment, arXiv:2503.14476.

    0                                                      up to max_tokens - buffer_tokens,
    -penalty · (length - (max - buffer)) / buffer          within the buffer,
    -penalty                                               from max_tokens on
    """
    share = (num_sampled_tokens - (max_tokens - buffer_tokens)) / buffer_tokens
    return -penalty * min(1.0, max(0.0, share))
