"""What a simulated run did, and what the tables take from it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from benchmarks.asynchrony.system import System
from benchmarks.asynchrony.workloads import Plan, bound_s


@dataclass
class Outcome:
    """What a run did, in virtual seconds."""

    system: System
    published_s: list[float] = field(default_factory=list)
    """When each update was published."""
    trained_samples: list[int] = field(default_factory=list)
    """Of each update."""
    max_lag: int = 0
    wait_s: list[float] = field(default_factory=list)
    num_episodes: int = 0
    """Finished."""
    plans: dict[tuple[int, int], Plan] = field(default_factory=dict)
    """Of every episode that began, by task and occurrence."""
    trained: list[tuple[int, int]] = field(default_factory=list)
    """Task and occurrence of every episode that was trained."""
    discarded: Mapping[str, int] = field(default_factory=dict)
    tokens_generated: float = 0.0
    tokens_wasted: float = 0.0
    """Of episodes that were not trained, and masked ones of those that were."""
    tasks_admitted: dict[int, int] = field(default_factory=dict)
    """Version at the first admission of each task."""
    busy_share: float = 0.0
    """Of the sampling GPUs' slots, over the whole run."""
    real_s: float = 0.0

    def update_s(self, warm_up: int) -> float:
        """Mean seconds of an update after the first `warm_up`."""
        assert len(self.published_s) > warm_up, f"{len(self.published_s)} updates leave none after {warm_up}"
        began = self.published_s[warm_up - 1] if warm_up else 0.0
        return (self.published_s[-1] - began) / (len(self.published_s) - warm_up)

    def alone_s(self, key: tuple[int, int]) -> float:
        """What an episode takes when it waits for nobody."""
        plan = self.plans[key]
        return plan.num_tokens * self.system.token_s + sum(plan.step_s) + plan.reward_s

    def longest_s(self) -> float:
        """L: of all episodes that began, trained or not."""
        return max(map(self.alone_s, self.plans))

    def bound_s(self, *, gpus: int) -> float:
        """What one update may take on `gpus` for sampling and training together; means are of all episodes that began.

        Episodes of filtered groups count among the N that are sampled.
        """
        mean_tokens = sum(plan.num_tokens for plan in self.plans.values()) / len(self.plans)
        filtered_share = sum(plan.is_filtered for plan in self.plans.values()) / len(self.plans)
        return bound_s(
            samples=self.system.groups * self.system.group_size / (1 - filtered_share),
            gpus=gpus,
            mu_gen_s=mean_tokens * self.system.token_s / self.system.slots,
            mu_train_s=self.system.train_s,
            longest_s=self.longest_s(),
            ratio=self.system.ratio,
            mu_reward_s=_mean(plan.reward_s for plan in self.plans.values()),
            reward_workers=self.system.reward_workers,
        )

    def task_bias(self) -> float:
        """Mean latency of the tasks that were trained / of all tasks: below 1 if slow tasks get lost."""
        latency_by_task = self._latency_by_task()
        trained = {task for task, _ in self.trained} & latency_by_task.keys()
        return _mean(latency_by_task[task] for task in trained) / _mean(latency_by_task.values())

    def sample_bias(self) -> float:
        """Mean latency of the episodes that were trained / of the first G of every task: below 1 if slow episodes get lost."""
        latency_by_task = self._latency_by_task()
        trained = (self.alone_s((task, occurrence)) for task, occurrence in self.trained if task in latency_by_task)
        return _mean(trained) / _mean(latency_by_task.values())

    def _latency_by_task(self) -> dict[int, float]:
        """Mean latency of each task's first G episodes, of tasks admitted in the first half: they had time to be trained."""
        last_version = len(self.published_s) // 2
        size = self.system.group_size
        return {
            task: _mean(self.alone_s((task, occurrence)) for occurrence in range(size))
            for task, version in self.tasks_admitted.items()
            if version <= last_version and all((task, occurrence) in self.plans for occurrence in range(size))
        }

    @property
    def wasted_share(self) -> float:
        return self.tokens_wasted / self.tokens_generated


def _mean(numbers: Iterable[float]) -> float:
    values = list(numbers)
    return sum(values) / len(values)
