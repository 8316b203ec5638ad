"""What episodes do, drawn from a seed: pure functions, no clock and no Redis.

A workload maps (task, occurrence) to a plan, so that every system under comparison plays the same tasks with the same lengths.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np


class Distribution(Protocol):
    """Positive numbers with a mean and a spread; `str` says which."""

    def draw(self, rng: np.random.Generator, count: int) -> list[float]: ...


@dataclass(frozen=True)
class Constant:
    value: float

    def draw(self, rng: np.random.Generator, count: int) -> list[float]:
        return [self.value] * count

    def __str__(self) -> str:
        return f"{self.value:g}"


@dataclass(frozen=True)
class Normal:
    """N(mean, deviation), negative draws set to 0: a latency cannot be less."""

    mean: float
    deviation: float

    def draw(self, rng: np.random.Generator, count: int) -> list[float]:
        return list(np.maximum(0.0, rng.normal(self.mean, self.deviation, count)).tolist())

    def __str__(self) -> str:
        return f"N({self.mean:g},{self.deviation:g})+"


@dataclass(frozen=True)
class LogNormal:
    """exp N(ln median, sigma), cut at `cap`: a long tail that ends at the length limit."""

    median: float
    sigma: float
    cap: float = float("inf")

    def draw(self, rng: np.random.Generator, count: int) -> list[float]:
        return list(np.minimum(self.cap, self.median * np.exp(rng.normal(0.0, self.sigma, count))).tolist())

    def __str__(self) -> str:
        cap = "" if self.cap == float("inf") else f"<={self.cap:g}"
        return f"LogN(median {self.median:g},σ {self.sigma:g}){cap}"


@dataclass(frozen=True)
class Plan:
    """One episode: tokens of each turn, the environment's seconds after each, the reward's seconds at the end."""

    turn_tokens: tuple[int, ...]
    step_s: tuple[float, ...]
    reward_s: float
    is_filtered: bool
    """Its group teaches nothing (all rewards equal), so the trainer leaves it out."""

    @property
    def num_tokens(self) -> int:
        return sum(self.turn_tokens)


@dataclass(frozen=True)
class Workload:
    """Independent draws per episode and turn, times one factor per task."""

    tokens: Distribution
    """Of one turn."""
    turns: Distribution = Constant(1)
    """Rounded, at least 1."""
    step_s: Distribution = Constant(0.0)
    reward_s: Distribution = Constant(0.0)
    task_factor: Distribution = Constant(1.0)
    """Multiplies a task's tokens and latencies: slow tasks are slow every time."""
    filtered_share: float = 0.0
    """Of tasks."""
    slow_share: float = 0.0
    """Of episodes, whose environment takes `slow_factor` times as long."""
    slow_factor: float = 1.0
    seed: int = 0

    def plan(self, task: int, occurrence: int) -> Plan:
        """The occurrence-th episode of a task; the same one whoever asks."""
        of_task = np.random.default_rng([self.seed, task])
        is_filtered = bool(of_task.random() < self.filtered_share)
        factor = self.task_factor.draw(of_task, 1)[0]
        rng = np.random.default_rng([self.seed, task, occurrence])
        slowness = self.slow_factor if self.slow_share and rng.random() < self.slow_share else 1.0
        turns = max(1, round(self.turns.draw(rng, 1)[0]))
        return Plan(
            turn_tokens=tuple(max(1, round(factor * tokens)) for tokens in self.tokens.draw(rng, turns)),
            step_s=tuple(slowness * factor * seconds for seconds in self.step_s.draw(rng, turns)),
            reward_s=self.reward_s.draw(rng, 1)[0],
            is_filtered=is_filtered,
        )

    def __str__(self) -> str:
        parts = [f"tokens {self.tokens}"]
        if self.turns != Constant(1):
            parts.append(f"turns {self.turns}")
        if self.step_s != Constant(0.0):
            parts.append(f"step {self.step_s} s")
        if self.reward_s != Constant(0.0):
            parts.append(f"reward {self.reward_s} s")
        if self.task_factor != Constant(1.0):
            parts.append(f"task × {self.task_factor}")
        if self.filtered_share:
            parts.append(f"{self.filtered_share:.0%} of groups filtered")
        if self.slow_share:
            parts.append(f"{self.slow_share:.0%} of episodes {self.slow_factor:g} × slower")
        return ", ".join(parts)


def bound_s(
    *,
    samples: float,
    gpus: int,
    mu_gen_s: float,
    mu_train_s: float,
    longest_s: float,
    ratio: float,
    mu_reward_s: float = 0.0,
    reward_workers: int | None = None,
) -> float:
    """Seconds of one update, at most:  T <= (N/K) (μ_gen + E μ_train) + (N/W) μ_reward + L / (α + 1)

    ROLL Flash, arXiv:2510.11345, whose bound has no reward workers; W of them are one more stage with a queue of its own.

    Args: mu_gen_s, mu_train_s: GPU seconds of a sample, all epochs. longest_s: the slowest episode. ratio: α.
    """
    rewards_s = samples / reward_workers * mu_reward_s if reward_workers else 0.0
    return samples / gpus * (mu_gen_s + mu_train_s) + rewards_s + longest_s / (ratio + 1)
