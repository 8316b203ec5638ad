"""How an environment's recent episodes went."""

from collections import Counter, deque
from collections.abc import Mapping
from typing import Final

import msgspec

from shared.trajectory import SUCCESS_REWARD, Outcome, Trajectory

WINDOW: Final = 256


class EpisodeStatistics(msgspec.Struct, frozen=True):
    """Rates over a window of episodes; None where there was none."""

    episodes: int
    success_rate: float | None
    mean_reward: float | None
    outcomes: Mapping[Outcome, int]


class StatisticsWindow:
    """The most recent episodes of one environment in this process."""

    def __init__(self) -> None:
        self._recent: deque[tuple[Outcome, float]] = deque(maxlen=WINDOW)
        self.last_problem: str | None = None
        """Why the latest episode that did not complete ended."""

    def add(self, trajectory: Trajectory) -> None:
        self._recent.append((trajectory.outcome, trajectory.reward))
        if trajectory.outcome is not Outcome.COMPLETED:
            self.last_problem = f"{trajectory.outcome}: {trajectory.detail}"

    def statistics(self) -> EpisodeStatistics:
        return summarise(self._recent)


def summarise(episodes: deque[tuple[Outcome, float]] | list[tuple[Outcome, float]]) -> EpisodeStatistics:
    """Statistics of (outcome, total reward) pairs. Episodes that failed count with the reward they had."""
    if not episodes:
        return EpisodeStatistics(0, None, None, {})
    rewards = [reward for _, reward in episodes]
    return EpisodeStatistics(
        episodes=len(rewards),
        success_rate=sum(reward >= SUCCESS_REWARD for reward in rewards) / len(rewards),
        mean_reward=sum(rewards) / len(rewards),
        outcomes=dict(Counter(outcome for outcome, _ in episodes)),
    )
