"""One run under virtual time: the product's rollout side and its trainer's decisions, around modelled engines and optimiser.

A run's life: Redis keys are fresh → RolloutLoop admits and plays → the trainer takes batches as `Lead` does, `train_s` later
publishes and acknowledges → after the last update the loop stops. Leases use Redis's own clock, so they are longer than any run.
"""

import asyncio
import contextlib
import subprocess
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, cast

import redis
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from benchmarks.asynchrony.engines import EngineFleet, LockStep
from benchmarks.asynchrony.virtual_time import virtual_loop
from benchmarks.asynchrony.workloads import Plan, Workload, bound_s
from services.env_agents.environment import Action, Environment, Message, Step
from services.env_agents.episode import EnvironmentAgent
from services.env_agents.episode_statistics import RunStatistics
from services.env_agents.generation import GenerationClient
from services.env_agents.group_filters import zero_variance
from services.env_agents.loading import EnvironmentLoader, LoadedEnvironment
from services.env_agents.metrics import AgentMetrics
from services.env_agents.registry import EnvironmentRegistry
from services.env_agents.rendering import ChatRenderer
from services.env_agents.rollout_loop import RolloutLoop, RolloutSettings
from services.env_agents.running_group import GroupRules
from services.env_agents.tasks import SeedTaskSource, Task
from services.standalone.redis_server import redis_executable
from shared import versions
from shared.configuration import EnvAgentsSection, RolloutSection
from shared.environment_spec import EnvironmentLimits, EnvironmentSpec, SamplingParameters, SeedTasks
from shared.keys import Keys
from shared.ledger import AdmissionLedger, DiscardReason, Ending, GroupRecord, Receipt, TrainingLedger
from shared.stream import Delivery, TrajectoryConsumer
from shared.trajectory import Trajectory
from trainer.assembly import Group
from trainer.rollouts import RolloutReader

LONG_S = 1e7
"""Longer than any run."""
LONG_MS = int(1000 * LONG_S)


@dataclass(frozen=True)
class System:
    """What runs the workload: the product's settings, the size of the model, and which features are switched off."""

    groups: int
    """B."""
    group_size: int
    """G."""
    ratio: float
    """α."""
    gpus: int
    """That sample."""
    slots: int = 1
    """Sequences that one of them samples at once."""
    token_s: float = 1.0
    training_gpus: int = 1
    train_s: float = 0.0
    """GPU seconds of one sample, over all epochs."""
    reward_workers: int | None = None
    """None for as many as are asked for."""
    on_stale: str = "wait"
    is_gang: bool = False
    """A group is one n=G call on one GPU."""
    is_lock_step: bool = False
    """Turns are played in rounds: all episodes sample, then all environments step."""
    is_batch: bool = False
    """Rewards begin when all responses of a round are there, and groups are judged when all rewards are."""
    redundant_groups: int = 0
    redundant_episodes: int = 0
    aborts_at_version: bool = False
    """At each update the groups, running ones too, that were admitted more than α updates ago are dropped, as ROLL does."""
    admission_poll_s: float = 0.25


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


@contextlib.contextmanager
def served_redis() -> Iterator[str]:
    """A Redis on a Unix socket of its own; yields its address."""
    with tempfile.TemporaryDirectory() as folder:
        socket = Path(folder) / "redis.sock"
        command = [
            redis_executable(),
            "--port",
            "0",
            "--unixsocket",
            str(socket),
            "--dir",
            folder,
            "--save",
            "",
            "--appendonly",
            "no",
        ]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
            try:
                deadline = time.monotonic() + 20
                while not socket.exists():
                    if time.monotonic() > deadline:
                        raise TimeoutError("Redis did not start within 20 s")
                    time.sleep(0.02)
                yield f"unix://{socket}"
            finally:
                process.terminate()


class _CountedRedis(redis.asyncio.Redis):
    """The clock stands still until Redis has answered. One connection, so that answers come in the order of the questions."""

    async def initialize(self) -> Self:
        with virtual_loop().real_io():
            return await super().initialize()

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        with virtual_loop().real_io():
            return await super().execute_command(*args, **options)  # type: ignore[no-untyped-call]


class _Renderer:
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


class _World:
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
        self.endings: _Endings
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


class _SimulatedEnvironment(Environment):
    """Takes the seconds that its plan says."""

    def __init__(self, world: _World) -> None:
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


class _Loader:
    """Loads nothing: there is one environment, and its tasks are their numbers."""

    def __init__(self, world: _World) -> None:
        self._world = world

    async def load(self, spec: EnvironmentSpec) -> LoadedEnvironment:
        return LoadedEnvironment(spec, lambda: _SimulatedEnvironment(self._world), SeedTaskSource(SeedTasks()), None, None, None)


class _WatchedLedger(AdmissionLedger):
    """The agents' ledger; says when a group may have become ready, as Redis would tell a trainer that blocks on the stream.

    Leases are renewed in virtual time and expire by Redis's clock, which is real; so they are long.
    """

    def __init__(self, client: redis.asyncio.Redis, keys: Keys, world: _World) -> None:
        super().__init__(client, keys)
        self._world = world
        self._num_finished: Counter[str] = Counter()
        self.group_by_trajectory: dict[str, str] = {}

    async def admit(
        self, *, group_id: str, environment: str, group_size: int, owner: str, lease_ms: int, num_needed: int | None = None
    ) -> GroupRecord | None:
        return await super().admit(
            group_id=group_id,
            environment=environment,
            group_size=group_size,
            owner=owner,
            lease_ms=LONG_MS,
            num_needed=num_needed,
        )

    async def renew(self, *, owner: str, lease_ms: int, group_ids: Iterable[str]) -> list[str]:
        return await super().renew(owner=owner, lease_ms=LONG_MS, group_ids=group_ids)

    async def endings(self) -> AsyncGenerator[Ending, None]:
        while True:
            yield await self._world.endings.get()

    async def finish(self, trajectory: Trajectory, *, num_needed: int | None = None, verdict: str = "") -> Receipt:
        receipt = await super().finish(trajectory, num_needed=num_needed, verdict=verdict)
        self.group_by_trajectory[trajectory.trajectory_id] = trajectory.group_id
        self._num_finished[trajectory.group_id] += 1
        if self._num_finished[trajectory.group_id] >= self._world.system.group_size:
            self._world.endings.receive()
            self._world.something_new.set()
        return receipt


class _Endings:
    """Redis's messages about groups that ended while they ran, received before the clock goes on."""

    def __init__(self, client: redis.Redis, keys: Keys) -> None:
        self._client = client
        self._channel = keys.endings
        self._pubsub = client.pubsub(ignore_subscribe_messages=True)  # type: ignore[no-untyped-call]
        self._pubsub.subscribe(self._channel)
        self._queue: asyncio.Queue[Ending] = asyncio.Queue()
        self.get = self._queue.get

    def receive(self) -> None:
        """Everything that was published up to now."""
        self._client.publish(self._channel, "bench-marker -")
        while True:
            message = self._pubsub.get_message(timeout=10)
            if message is None:
                continue
            reason, _, group_id = message["data"].decode().partition(" ")
            if reason == "bench-marker":
                return
            self._queue.put_nowait(Ending(reason, group_id))


class _Consumer(TrajectoryConsumer):
    """Never blocks: the modelled trainer waits in virtual time, between readings."""

    is_drained = False

    def read(self, *, block_ms: int) -> list[Delivery]:
        deliveries = list(self._decoded(self._read(">", block_ms=None)))
        self.is_drained = not deliveries
        return deliveries


class _Trainer:
    """`TrainingLoop` with the optimiser's seconds modelled: batch → train → push → publish → acknowledge."""

    def __init__(self, world: _World, client: redis.Redis, keys: Keys) -> None:
        self._world = world
        self._system = world.system
        rollout = RolloutSection(
            rollout_batch_size=self._system.groups,
            num_return_sequences_in_group=self._system.group_size,
            async_generation_ratio=self._system.ratio,
            on_stale=cast(Any, self._system.on_stale),
            redundant_groups=self._system.redundant_groups,
            redundant_episodes=self._system.redundant_episodes,
            max_filtered_groups=1_000_000,
            stale_wait_s=LONG_S,
        )
        self._client = client
        self._keys = keys
        self.ledger = TrainingLedger(client, keys)
        self.ledger.create_consumer_group()
        self._consumer = _Consumer(client, keys, self.ledger)
        self._reader = RolloutReader(self._consumer, self.ledger, rollout, timeout_s=LONG_S)
        self.trained_group_ids: set[str] = set()

    async def run(self, num_updates: int, progress: Callable[[int], None]) -> None:
        clock, outcome = asyncio.get_running_loop(), self._world.outcome
        for version in range(num_updates):
            began = clock.time()
            groups = await self._next_batch(version)
            self._world.endings.receive()
            outcome.wait_s.append(clock.time() - began)
            samples = sum(len(group.trainable) for group in groups)
            await asyncio.sleep(samples * self._system.train_s / self._system.training_gpus)
            group_ids = [group.group_id for group in groups]
            self._world.fleet.publish(version + 1)
            self.ledger.publish(version + 1, group_ids)
            self.ledger.acknowledge(version + 1)
            self._note(groups, version)
            outcome.published_s.append(clock.time())
            outcome.trained_samples.append(samples)
            self._reader.give_up_stale(version + 1)
            if self._system.aborts_at_version:
                self._discard_live(admitted_before=version + 1 - self._system.ratio, requeue=False)
            self._world.endings.receive()
            progress(version + 1)

    async def _next_batch(self, version: int) -> tuple[Group, ...]:
        while True:
            self._world.something_new.clear()
            if not (self._system.is_batch and self._world.num_open):
                self._consumer.is_drained = False
                selection = self._reader.next_batch(version, progress=_ignore, is_stopped=lambda: self._consumer.is_drained)
                if selection:
                    return selection.batch
                self._world.endings.receive()
            await self._world.something_new.wait()
            if self._system.is_batch:
                await asyncio.sleep(1e-3)  # Environments close after their last record's siblings wake this.

    def _note(self, groups: Iterable[Group], version: int) -> None:
        outcome = self._world.outcome
        for group in groups:
            self.trained_group_ids.add(group.group_id)
            for episode in group.episodes:
                outcome.max_lag = max(outcome.max_lag, versions.lag(version, episode.oldest_version or 0))
                work = self._world.fleet.work_by_session[episode.trajectory_id]
                outcome.trained.append((work.task, work.occurrence))

    def _discard_live(self, *, admitted_before: float, requeue: bool) -> None:
        """Gives up every group, ready or running, that was admitted before a version."""
        live = self.ledger.live_groups()
        records = [*(group.record for group in live.ready), *live.running]
        old = [record.group_id for record in records if record.admitted_version < admitted_before]
        if old:
            self.ledger.discard(old, DiscardReason.STALE, requeue=requeue)


def _ignore(*_: int) -> None:
    pass


async def simulate(
    system: System, workload: Workload, redis_url: str, *, num_updates: int, progress: Callable[[int], None] = _ignore
) -> Outcome:
    """Runs `num_updates` updates. Call it under `virtual_time.run`."""
    began = time.monotonic()
    keys = Keys(f"bench-{uuid.uuid4().hex[:12]}")
    world = _World(system, workload)
    with redis.Redis.from_url(redis_url) as sync_client:
        world.endings = _Endings(sync_client, keys)
        trainer = _Trainer(world, sync_client, keys)
        async with _rolling_out(world, redis_url, keys) as ledger:
            await trainer.run(num_updates, progress)
            world.is_over = True
            world.outcome.discarded = trainer.ledger.books().discarded
            _count_tokens(world, trainer, ledger)
        for key in sync_client.scan_iter(f"*{{{keys.run_id}}}*", count=1000):
            sync_client.delete(key)
    world.outcome.real_s = time.monotonic() - began
    return world.outcome


@contextlib.asynccontextmanager
async def _rolling_out(world: _World, redis_url: str, keys: Keys) -> AsyncIterator[_WatchedLedger]:
    system = world.system
    connection = _CountedRedis.from_url(redis_url, retry=Retry(NoBackoff(), 0), single_connection_client=True)
    async with connection as client:
        ledger = _WatchedLedger(client, keys, world)
        await ledger.configure(
            async_generation_ratio=system.ratio, batch_groups=system.groups, redundant_groups=system.redundant_groups
        )
        registry = EnvironmentRegistry(client, keys, cast(EnvironmentLoader, _Loader(world)))
        await registry.declare(_spec())
        settings = RolloutSettings(
            run_id=keys.run_id,
            owner="simulated",
            groups=GroupRules(
                size=system.group_size,
                redundant_episodes=system.redundant_episodes,
                filters={"zero_variance": zero_variance} if world.workload.filtered_share else {},
            ),
            lease_s=EnvAgentsSection().lease_s,
            admission_poll_s=system.admission_poll_s,
            refresh_s=LONG_S,
            grace_s=0.0,
        )
        agent = EnvironmentAgent(cast(ChatRenderer, _Renderer()), cast(GenerationClient, world.fleet))
        statistics = RunStatistics(client, keys, process="simulated")
        loop = RolloutLoop(settings, ledger, registry, agent, AgentMetrics(), statistics)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(loop.run())
            try:
                yield ledger
            finally:
                loop.stop()
                await running


def _spec() -> EnvironmentSpec:
    limits = EnvironmentLimits(
        max_turns=10_000,
        max_tokens=10_000_000,
        reset_timeout_s=LONG_S,
        step_timeout_s=LONG_S,
        episode_timeout_s=LONG_S,
        max_concurrent_episodes=1_000_000,
    )
    return EnvironmentSpec(
        name="simulated",
        import_path="benchmarks.asynchrony.stack:_SimulatedEnvironment",
        limits=limits,
        sampling=SamplingParameters(max_new_tokens=32_768),
    )


def _count_tokens(world: _World, trainer: _Trainer, ledger: _WatchedLedger) -> None:
    """What became of every sampled token: trained, wasted, or still on its way at the end."""
    kept = {*trainer.ledger.live_groups().ids, *trainer.trained_group_ids}
    outcome = world.outcome
    for session, work in world.fleet.work_by_session.items():
        group_id = ledger.group_by_trajectory.get(session)
        outcome.tokens_generated += work.num_tokens
        is_cancelled = group_id is None and (work.task, work.occurrence) in world.closed
        if is_cancelled or (group_id is not None and group_id not in kept):
            outcome.tokens_wasted += work.num_tokens
    slots = world.system.gpus * world.system.slots
    outcome.busy_share = outcome.tokens_generated * world.system.token_s / (slots * outcome.published_s[-1])
