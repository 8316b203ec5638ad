"""One run: the product's agents, advantages, batch plan, loss and DeepSpeed step, on data of an exact lag."""

import asyncio
import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
import yaml
from torch import Tensor

from benchmarks.learning.sampler import TorchSampler
from examples.calculator import Calculator
from services.env_agents.datasets import TaskOpener
from services.env_agents.episode import EnvironmentAgent
from services.env_agents.episode_log import EpisodeIdentity
from services.env_agents.identifiers import uuid7
from services.env_agents.rendering import load_renderer
from services.env_agents.tasks import TaskSource
from shared.configuration import Configuration
from shared.environment_spec import EnvironmentSpec
from shared.stream import Delivery
from shared.trajectory import Trajectory
from trainer.assembly import Episode, Group, Selection
from trainer.lead import plan_batch
from trainer.learner import Learner
from trainer.model import Policy, build_engine, load_policy, start_ranks

RUN_FILE = Path(__file__).parents[2] / "examples" / "demo.yaml"


@dataclass(frozen=True)
class Arm:
    """A way to learn from data of one lag."""

    pg_variant: str
    lag: int
    """Updates between the weights that sample and those that learn; less in the first `lag` updates."""
    settings: tuple[tuple[str, Any], ...] = ()
    """Of the trainer's section, beside pg_variant."""

    @property
    def name(self) -> str:
        return "synchronous" if self.lag == 0 else f"{self.pg_variant}, α = {self.lag}"


@dataclass(frozen=True)
class Scale:
    """The size of every run."""

    num_updates: int
    groups: int = 16
    group_size: int = 8
    eval_every: int = 5
    eval_episodes: int = 256


@dataclass(frozen=True)
class Curve:
    """Success on unseen tasks, sampled at temperature 1, by updates done."""

    arm: Arm
    seed: int
    updates: tuple[int, ...]
    success: tuple[float, ...]

    @property
    def final(self) -> float:
        """Mean of the last three measurements: one has a standard error of some 2 points."""
        return sum(self.success[-3:]) / len(self.success[-3:])

    @property
    def area(self) -> float:
        """Mean success over the run, by the trapezoidal rule."""
        pieces = zip(itertools.pairwise(self.updates), itertools.pairwise(self.success), strict=True)
        total = sum((end - start) * (low + high) / 2 for (start, end), (low, high) in pieces)
        return total / (self.updates[-1] - self.updates[0])


def learn(arm: Arm, seed: int, policy: Path, scale: Scale) -> Curve:
    """Trains a copy of the policy in `policy`. Call it in a process of its own: it joins a process group of one rank."""
    torch.set_num_threads(1)
    start_ranks(timeout=timedelta(minutes=30))
    configuration = _configuration(arm, seed, policy, scale)
    trainer = configuration.trainer
    learner = Learner(build_engine(load_policy(policy, trainer), trainer), trainer, seed=seed, reference=None)
    players = Players(configuration, seed=seed)
    published = deque([_copy(learner.policy)], maxlen=arm.lag + 1)
    measured: dict[int, float] = {}
    for version in range(scale.num_updates):
        if version % scale.eval_every == 0:
            measured[version] = players.success(published[-1], scale.eval_episodes)
        sampled_by = max(0, version - arm.lag)
        groups = players.groups(published[0], sampled_by, first=version * scale.groups)
        _update(learner, configuration, groups, version=version, oldest_version=sampled_by)
        published.append(_copy(learner.policy))
    measured[scale.num_updates] = players.success(published[-1], scale.eval_episodes)
    return Curve(arm, seed, tuple(measured), tuple(measured.values()))


class Players:
    """Environment Agents that play the demo's calculator with a sampler in place of the hub."""

    def __init__(self, configuration: Configuration, *, seed: int) -> None:
        section = configuration.env_agents
        model_path = Path(configuration.run.model_path)
        renderer = load_renderer(model_path, section.renderer, section.renderer_options)
        self._rollout = configuration.rollout
        self._spec: EnvironmentSpec = section.environments[0]
        self._sampler = TorchSampler(model_path, renderer.stop_token_ids, seed=seed)
        self._agent = EnvironmentAgent(renderer, self._sampler)  # type: ignore[arg-type]
        opener = TaskOpener(renderer.prompt, seed=seed)
        assert self._spec.evaluation_tasks is not None
        self._tasks = opener.open(self._spec.tasks, (), needs_prompts=False)
        self._unseen = opener.open(self._spec.evaluation_tasks, (), needs_prompts=False, in_file_order=True)

    def groups(self, weights: Mapping[str, Tensor], version: int, *, first: int) -> list[list[Trajectory]]:
        """One batch of groups, of the tasks from `first` on, all sampled by `weights`."""
        self._sampler.load(weights, version)
        size = self._rollout.num_return_sequences_in_group
        return asyncio.run(self._play(self._tasks, range(first, first + self._rollout.rollout_batch_size), size))

    def success(self, weights: Mapping[str, Tensor], num_episodes: int) -> float:
        """Share of unseen tasks solved at temperature 1."""
        self._sampler.load(weights, 0)
        played = asyncio.run(self._play(self._unseen, range(num_episodes), 1))
        return sum(trajectory.reward >= 1 for (trajectory,) in played) / num_episodes

    async def _play(self, tasks: TaskSource, indexes: Sequence[int], size: int) -> list[list[Trajectory]]:
        for _ in range(len(indexes) * size):
            self._sampler.open_episode()
        return list(await asyncio.gather(*(self._play_group(tasks, index, size) for index in indexes)))

    async def _play_group(self, tasks: TaskSource, index: int, size: int) -> list[Trajectory]:
        group_id = uuid7()
        return list(await asyncio.gather(*(self._play_episode(tasks, index, group_id, size, of_group) for of_group in range(size))))

    async def _play_episode(self, tasks: TaskSource, index: int, group_id: str, size: int, sample_index: int) -> Trajectory:
        task = tasks.task(index)
        identity = EpisodeIdentity(
            run_id="learning",
            trajectory_id=uuid7(),
            group_id=group_id,
            group_size=size,
            sample_index=sample_index,
            attempt=0,
            environment=self._spec.name,
            task_id=task.task_id,
        )
        try:
            return await self._agent.run(Calculator, self._spec, task, identity)
        finally:
            self._sampler.close_episode()


def _update(
    learner: Learner, configuration: Configuration, groups: Sequence[Sequence[Trajectory]], *, version: int, oldest_version: int
) -> None:
    deliveries = [[Delivery(trajectory.trajectory_id, trajectory) for trajectory in group] for group in groups]
    batch = tuple(Group(group[0].trajectory.group_id, tuple(map(Episode.of, group))) for group in deliveries)
    selection = Selection(batch=batch, oldest_version=oldest_version, stale=(), failed=(), awaited=())
    trajectories = {delivery.entry_id: delivery.trajectory for group in deliveries for delivery in group}
    learner.learn(plan_batch(selection, version, configuration, num_ranks=1, cost=learner.policy.sequence_cost()), trajectories)


def _copy(policy: Policy) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in policy.named_weights()}


def _configuration(arm: Arm, seed: int, policy: Path, scale: Scale) -> Configuration:
    """The demo's run file with the arm's settings."""
    raw = yaml.safe_load(RUN_FILE.read_text())
    raw["run"] = {"id": "learning", "directory": str(policy), "model_path": str(policy), "seed": seed}
    raw["rollout"] |= {
        "rollout_batch_size": scale.groups,
        "num_return_sequences_in_group": scale.group_size,
        "async_generation_ratio": arm.lag,
    }
    (calculator,) = raw["env_agents"]["environments"]
    calculator["tasks"]["path"] = str(policy / "train.parquet")
    calculator["evaluation_tasks"]["path"] = str(policy / "heldout.parquet")
    raw["trainer"] |= {"num_updates": scale.num_updates, "pg_variant": arm.pg_variant, **dict(arm.settings)}
    return msgspec.convert(raw, Configuration)
