"""Rewards that a spec adds to what an environment scores: what they are given, what they answer, and how often they are asked.

A reward that cannot be had is an error of the episode, never a zero: the trainer would take a zero for a lesson.
"""

import asyncio
import math
import numbers
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, Protocol

import msgspec

from services.env_agents.retries import RetryBudget
from services.env_agents.tasks import Task
from shared.environment_spec import RewardSpec
from shared.errors import EpisodeError

MAX_PARTS = 64
"""They travel in every record."""


class FinishedEpisode(msgspec.Struct, frozen=True):
    """A completed episode, as rewards see it."""

    task: Task
    messages: Sequence[Mapping[str, Any]]
    """The whole conversation; the policy's turns are `assistant` messages, with `tool_calls` as chat templates write them."""
    answer: str
    """The policy's last text, without thoughts."""


class Scored(msgspec.Struct, frozen=True):
    """A reward with its parts, which are for reading only."""

    reward: float
    parts: Mapping[str, float] = {}


class RewardProblem(StrEnum):
    """Why there is no reward; the fields of RewardRetries."""

    TIMEOUT = "timeout"
    UNREACHABLE = "unreachable"
    ERROR = "error"
    UNUSABLE = "unusable"


class RewardError(EpisodeError):
    """A try that gave no reward."""

    def __init__(self, problem: RewardProblem, message: str) -> None:
        super().__init__(message)
        self.problem = problem


class RewardSource(Protocol):
    """One way to a reward."""

    async def score(self, episode: FinishedEpisode) -> object:
        """One try: a number, or a mapping {reward, parts}. Raises: RewardError."""
        ...


class DeclaredReward:
    """The reward that an environment's spec declares."""

    def __init__(self, spec: RewardSpec, source: RewardSource) -> None:
        self._spec = spec
        self._source = source

    async def score(self, episode: FinishedEpisode) -> Scored:
        """The weighted reward, parts under the names that they have in a trajectory; tried again as often as the spec allows.

        Raises: EpisodeError when the retries for what went wrong are used up.
        """
        budget = RetryBudget(self._spec.retries)
        while True:
            try:
                return self._weighted(checked_score(await self._try(episode)))
            except RewardError as error:
                if not await budget.spend(error.problem):
                    allowed = getattr(self._spec.retries, error.problem)
                    raise EpisodeError(
                        f"the reward {self._spec.part!r} failed, with retries.{error.problem} = {allowed} used up: {error}"
                    ) from error

    async def _try(self, episode: FinishedEpisode) -> object:
        scope = asyncio.timeout(self._spec.timeout_s)
        try:
            async with scope:
                return await self._source.score(episode)
        except TimeoutError as error:
            if scope.expired():
                raise RewardError(RewardProblem.TIMEOUT, f"no answer within {self._spec.timeout_s:g} s") from error
            raise

    def _weighted(self, scored: Scored) -> Scored:
        part, weight = self._spec.part, self._spec.weight
        parts = {f"{part}.{name}": weight * value for name, value in scored.parts.items()}
        return Scored(weight * scored.reward, {part: weight * scored.reward, **parts})


def checked_score(answer: object) -> Scored:
    """Raises: RewardError unless the answer is a finite number, or a mapping {reward, parts} of such."""
    match answer:
        case Scored(reward=reward, parts=parts) | {"reward": reward, "parts": Mapping() as parts}:
            if len(parts) > MAX_PARTS:
                raise RewardError(RewardProblem.UNUSABLE, f"a reward must have at most {MAX_PARTS} parts, got {len(parts)}")
            return Scored(_finite(reward, answer), {str(name): _finite(value, answer) for name, value in parts.items()})
        case {"reward": reward, **others} if "parts" not in others:
            return Scored(_finite(reward, answer))
        case _:
            return Scored(_finite(answer, answer))


def _finite(value: object, answer: object) -> float:
    """A plain float: numpy's scalars count as numbers, and the record's codec does not know them."""
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise RewardError(
            RewardProblem.UNUSABLE, f"a reward must be a finite number, or {{reward, parts}} of such, got {answer!r:.200}"
        )
    return float(value)
