"""Evaluations as the agents answer them: to the trainer between two updates, and to `headrace evaluate`."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from shared.environment_spec import NonNegativeInt, PositiveInt
from shared.trajectory import SUCCESS_REWARD, Outcome


class EvaluationRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`POST /evaluations`: the first `num_episodes` held-out tasks of each environment, in file order."""

    num_episodes: PositiveInt
    greedy: bool = False
    """At the most likely token instead of the environment's own sampling."""
    environments: tuple[str, ...] | None = None
    """None means every environment that has evaluation_tasks."""
    transcripts: NonNegativeInt = 0
    """Texts to return, of each environment's first tasks."""


class EpisodeStatistics(msgspec.Struct, frozen=True):
    """Rates over a window of episodes; None where there was none."""

    episodes: int
    success_rate: float | None
    mean_reward: float | None
    outcomes: Mapping[Outcome, int]


class Transcript(msgspec.Struct, frozen=True):
    environment: str
    task_id: str
    reward: float
    outcome: Outcome
    text: str


class EvaluationResult(msgspec.Struct, frozen=True):
    version: int
    """The newest policy version that sampled; 0 if nothing was sampled."""
    results: Mapping[str, EpisodeStatistics]
    transcripts: Sequence[Transcript]


class EvaluationLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of `POST /evaluations/episodes`: the plan first, then an episode for each that it counts."""

    num_episodes: Mapping[str, int] = {}
    """By environment; on the first line only."""
    trajectory: bytes = b""
    """An episode that has ended, in the wire's encoding (shared/trajectory.py); base64 within JSON."""


def summarise(episodes: Iterable[tuple[Outcome, float]]) -> EpisodeStatistics:
    """Statistics of (outcome, total reward) pairs. Episodes that failed count with the reward they had."""
    episodes = list(episodes)
    if not episodes:
        return EpisodeStatistics(0, None, None, {})
    rewards = [reward for _, reward in episodes]
    return EpisodeStatistics(
        episodes=len(rewards),
        success_rate=sum(reward >= SUCCESS_REWARD for reward in rewards) / len(rewards),
        mean_reward=sum(rewards) / len(rewards),
        outcomes=dict(Counter(outcome for outcome, _ in episodes)),
    )
