"""The environment of a simulated run, and what it shares with the engines and the trainer.

The rollout loop plays it as it would any other: it is loaded, rendered, reset, stepped and closed.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.asynchrony.engines import EngineFleet, LockStep
from benchmarks.asynchrony.outcome import Outcome
from benchmarks.asynchrony.system import System
from benchmarks.asynchrony.workloads import Plan, Workload
from services.env_agents.environment import Action, Environment, Message, Step
from services.env_agents.loading import LoadedEnvironment
from services.env_agents.tasks import SeedTaskSource, Task
from shared.environment_spec import EnvironmentSpec, SeedTasks


class World:
    """What the parts of one run share."""

    def __init__(self, system: System, workload: Workload) -> None:
        self.system = system
        self.workload = workload
        self.outcome = Outcome(system)
        self.lock_step = LockStep()
        self.reward_workers = asyncio.Semaphore(system.reward_workers or 1_000_000)
        self.something_new = asyncio.Event()
        """A group became ready, or an episode ended."""
        self.is_over = False
        self.num_open = 0
        self._occurrences: Counter[int] = Counter()
        self.closed: set[tuple[int, int]] = set()
        self.fleet = EngineFleet(
            lambda task, occurrence, turn: self.plan(task, occurrence).turn_tokens[turn],
            gpus=system.gpus,
            slots=system.slots,
            token_s=system.token_s,
            gang_size=system.group_size if system.is_gang else 1,
            lock_step=self.lock_step if system.is_lock_step else None,
        )

    def begin(self, task: int) -> tuple[int, Plan]:
        """The next occurrence of a task."""
        occurrence = self._occurrences[task]
        self._occurrences[task] += 1
        self.num_open += 1
        self.outcome.tasks_admitted.setdefault(task, self.fleet.version)
        return occurrence, self.plan(task, occurrence)

    def plan(self, task: int, occurrence: int) -> Plan:
        key = (task, occurrence)
        if key not in self.outcome.plans:
            self.outcome.plans[key] = self.workload.plan(task, occurrence)
        return self.outcome.plans[key]


class TokenRenderer:
    """Chat rendering without a tokenizer: a prompt's ids are its task and occurrence, which the first message names."""

    stop_token_ids = (0,)

    def prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        return [int(word) for word in messages[0]["content"].split()]

    def parse(self, prompt_ids: list[int], sampled_ids: list[int], tools: Sequence[Mapping[str, Any]]) -> Action:
        return Action("")

    def extend(
        self, prompt_ids: list[int], sampled_ids: list[int], messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> list[int]:
        return [0]


class SimulatedEnvironment(Environment):
    """Takes the seconds that its plan says."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._occurrence: int | None = None
        self._num_turns = 0

    async def reset(self, task: Task) -> list[Message]:
        self._task = task.seed
        self._occurrence, self._plan = self._world.begin(task.seed)
        if self._world.system.is_lock_step or self._world.system.is_batch:
            self._world.lock_step.enter()
        return [{"role": "user", "content": f"{task.seed} {self._occurrence}"}]

    async def step(self, action: Action) -> Step:
        system = self._world.system
        if system.is_lock_step:
            await self._world.lock_step.arrive()
        if seconds := self._plan.step_s[self._num_turns]:
            await asyncio.sleep(seconds)
        self._num_turns += 1
        if self._num_turns < len(self._plan.turn_tokens):
            return Step(messages=[{"role": "user", "content": "on"}])
        if system.is_batch:
            await self._world.lock_step.arrive()
        if self._plan.reward_s:
            async with self._world.reward_workers:
                await asyncio.sleep(self._plan.reward_s)
        self._world.outcome.num_episodes += 1
        return Step(done=True, reward=0.0 if self._plan.is_filtered else 1.0 + (self._occurrence or 0))

    async def close(self) -> None:
        if self._occurrence is None:
            return
        if not self._world.is_over:
            self._world.closed.add((self._task, self._occurrence))
        if self._world.system.is_lock_step or self._world.system.is_batch:
            self._world.lock_step.leave()
        self._world.num_open -= 1


class SimulatedLoader:
    """Loads nothing: there is one environment, and its tasks are their numbers."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def load(self, spec: EnvironmentSpec) -> LoadedEnvironment:
        return LoadedEnvironment(spec, lambda: SimulatedEnvironment(self._world), SeedTaskSource(SeedTasks()), None, None, None)
