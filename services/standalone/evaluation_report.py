"""What an evaluation found: rates with their uncertainty, lengths and failures by environment. Pure."""

import math
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
from rich.console import Console, Group, RenderableType
from rich.text import Text

from services.standalone import printing
from shared.evaluation import summarise
from shared.trajectory import SUCCESS_REWARD, Outcome, Trajectory

CONFIDENCE: Final = 0.95
NORMAL_QUANTILE: Final = 1.959963984540054
"""Of the standard normal distribution at (1 + CONFIDENCE) / 2."""
COLUMNS: Final = ("environment", "success", "95 %", "reward", "turns", "tokens", "episodes", "failures")


class Problem(msgspec.Struct, frozen=True):
    """Why the first episode with this outcome ended."""

    outcome: Outcome
    task_id: str
    detail: str


class EnvironmentResult(msgspec.Struct, frozen=True):
    """Means are over all episodes, failed ones included, whose reward is what they had."""

    episodes: int
    success_rate: float
    success_interval: tuple[float, float]
    """Wilson's, at a confidence of 95 %."""
    mean_reward: float
    mean_turns: float
    mean_tokens: float
    """Prompt, sampled and observation tokens."""
    mean_sampled_tokens: float
    outcomes: Mapping[Outcome, int]
    num_scored: int
    """Episodes whose reward says something about the policy."""
    problems: tuple[Problem, ...]


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """evaluation.json, and what --json prints."""

    model: str
    """Directory."""
    version: int | None
    """Of the checkpoint; null for a model that is none."""
    greedy: bool
    seconds: float
    """From the first episode's start to the last one's end."""
    trajectories: str
    """The file with every episode in words, one JSON object a line. Versions in it are the engines', which begin at 0."""
    results: Mapping[str, EnvironmentResult]

    @property
    def is_scored(self) -> bool:
        return all(result.num_scored for result in self.results.values())


def environment_result(trajectories: Sequence[Trajectory]) -> EnvironmentResult:
    """Of at least one episode."""
    count = len(trajectories)
    statistics = summarise([(trajectory.outcome, trajectory.reward) for trajectory in trajectories])
    assert statistics.success_rate is not None
    assert statistics.mean_reward is not None
    problems: dict[Outcome, Problem] = {}
    for trajectory in trajectories:
        if trajectory.outcome is not Outcome.COMPLETED:
            problems.setdefault(trajectory.outcome, Problem(trajectory.outcome, trajectory.task_id, trajectory.detail))
    return EnvironmentResult(
        episodes=count,
        success_rate=statistics.success_rate,
        success_interval=wilson_interval(sum(trajectory.reward >= SUCCESS_REWARD for trajectory in trajectories), count),
        mean_reward=statistics.mean_reward,
        mean_turns=sum(len(trajectory.turns) for trajectory in trajectories) / count,
        mean_tokens=sum(trajectory.num_tokens for trajectory in trajectories) / count,
        mean_sampled_tokens=sum(trajectory.num_sampled_tokens for trajectory in trajectories) / count,
        outcomes=statistics.outcomes,
        num_scored=sum(trajectory.is_trainable for trajectory in trajectories),
        problems=tuple(problems.values()),
    )


def wilson_interval(num_successes: int, num_trials: int) -> tuple[float, float]:
    """Score interval of a binomial proportion at CONFIDENCE; unlike p ± z·σ it holds for few trials and at 0 and 1.

    (p + z²/2n ± z √(p(1-p)/n + z²/4n²)) / (1 + z²/n)        Wilson, JASA 22 (1927) 209-212
    """
    n, z = num_trials, NORMAL_QUANTILE
    p = num_successes / n
    middle = p + z * z / (2 * n)
    half_width = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    low = 0.0 if num_successes == 0 else (middle - half_width) / scale
    high = 1.0 if num_successes == num_trials else (middle + half_width) / scale
    return low, high


def overview(console: Console, evaluation: Evaluation) -> RenderableType:
    """A row for each environment, and below them why the first episode of each failure ended."""
    what = evaluation.model if evaluation.version is None else f"version {evaluation.version}, {evaluation.model}"
    how = "greedy" if evaluation.greedy else "sampled"
    rows = [_row(name, result) for name, result in evaluation.results.items()]
    problems = [
        Text(printing.one_line(f"{name}, task {problem.task_id}: {problem.outcome}: {_last_line(problem.detail)}"))
        for name, result in evaluation.results.items()
        for problem in result.problems
    ]
    return Group(printing.table(console, COLUMNS, rows, title=f"held-out tasks, {how}: {what}"), *problems)


def _row(name: str, result: EnvironmentResult) -> tuple[object, ...]:
    low, high = result.success_interval
    failures = [f"{outcome} {count}" for outcome, count in result.outcomes.items() if outcome is not Outcome.COMPLETED]
    return (
        name,
        f"{result.success_rate:.1%}",
        f"{low:.1%} to {high:.1%}",
        f"{result.mean_reward:.3f}",
        f"{result.mean_turns:.1f}",
        f"{result.mean_sampled_tokens:.0f} of {result.mean_tokens:.0f}",
        result.episodes,
        ", ".join(failures) or "none",
    )


def _last_line(detail: str) -> str:
    """Of a traceback, what was raised."""
    return detail.strip().rpartition("\n")[2]
