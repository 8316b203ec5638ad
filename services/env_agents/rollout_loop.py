"""The RolloutLoop: takes places from the ledger, plays each episode of a group by itself, and records every one that ends."""

import asyncio
import contextlib
import functools
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import redis
from redis.exceptions import NoPermissionError

from services.env_agents.cancelling import cancel_all
from services.env_agents.episode import EnvironmentAgent
from services.env_agents.episode_log import EpisodeIdentity
from services.env_agents.episode_statistics import RunStatistics
from services.env_agents.identifiers import uuid7
from services.env_agents.metrics import AgentMetrics
from services.env_agents.mixing import Candidate, next_environment
from services.env_agents.registry import EnvironmentRegistry, RegisteredEnvironment
from services.env_agents.running_group import GroupRules, RunningGroup
from shared.ledger import AdmissionLedger, DiscardReason, GroupRecord, Receipt
from shared.trajectory import Trajectory

Answer = TypeVar("Answer")

REDIS_AWAY = (redis.ConnectionError, redis.TimeoutError, redis.ReadOnlyError)
"""Errors that pass when Redis is back, such as during its restart."""

COMPLETE = "complete"
"""Why episodes are cancelled whose group has all it needs."""
SURPLUS = "surplus"
"""As what the ledger counts their tokens."""

_FIRST_BACKOFF_S = 0.05
_LONGEST_BACKOFF_S = 2.0
_ADOPTION_TIMEOUT_S = 1.0
_RELEASE_TIMEOUT_S = 1.0

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RolloutSettings:
    """What a RolloutLoop needs to know of the run."""

    run_id: str
    owner: str
    """Names this process in the ledger's leases."""
    groups: GroupRules
    lease_s: float
    admission_poll_s: float = 0.05
    """Wait between two requests for a place while there is none."""
    refresh_s: float = 1.0
    """Wait between two looks at what changed in the registry, and at groups past their deadline."""
    grace_s: float = 5.0
    """How long running episodes may go on after `stop`."""


class RolloutLoop:
    """Admission, leases, adoption and recording, for as long as `run` runs.

    A group is here from its admission or adoption until it is complete, or until it is lost: discarded, adopted by another
    process, or its environment deleted. What still runs of it then is cancelled at once, requests to the engines included; the
    ledger knows of it.
    """

    def __init__(
        self,
        settings: RolloutSettings,
        ledger: AdmissionLedger,
        registry: EnvironmentRegistry,
        agent: EnvironmentAgent,
        metrics: AgentMetrics,
        statistics: RunStatistics,
    ) -> None:
        self._settings = settings
        self._lease_ms = int(1000 * settings.lease_s)
        self._ledger = ledger
        self._registry = registry
        self._agent = agent
        self._metrics = metrics
        self._statistics = statistics
        self._group_by_id: dict[str, RunningGroup] = {}
        self._credit_by_name: dict[str, float] = {}
        self._recording: set[asyncio.Task[None]] = set()
        self._wasted_tokens: Counter[str] = Counter()
        """Of cancelled episodes, which the ledger does not know of yet; a process that dies takes it along."""
        self._is_redis_away = False
        self._stopping = asyncio.Event()
        self._tasks = asyncio.TaskGroup()

    @property
    def owner(self) -> str:
        """Names this process."""
        return self._settings.owner

    @property
    def num_episodes_in_flight(self) -> int:
        return sum(len(group.tasks) for group in self._group_by_id.values())

    async def run(self) -> None:
        """Rolls out until `stop`; then lets episodes end for a moment, and leaves the rest to other processes."""
        async with self._tasks:
            adopting = self._tasks.create_task(self._adopt_expired())
            keepers = [
                self._tasks.create_task(self._keep_leases()),
                self._tasks.create_task(self._follow_endings()),
                self._tasks.create_task(self._settle_overdue()),
                self._tasks.create_task(self._follow_registry()),
            ]
            await self._admit_groups()
            # An adoption that is cut off half way would keep its group from others for as long as a lease.
            await asyncio.wait([adopting], timeout=_ADOPTION_TIMEOUT_S)
            await self._wait_for_episodes()
            await cancel_all([adopting, *keepers])
            left = list(self._group_by_id)  # From here on nobody begins an episode.
            await cancel_all(self._episode_tasks())
            await self._release_leases(left)

    def stop(self) -> None:
        """Admits and adopts nothing more; `run` returns within the grace period and two seconds."""
        self._stopping.set()

    async def _admit_groups(self) -> None:
        while not self._stopping.is_set():
            try:
                is_admitted = await self._admit_one()
            except REDIS_AWAY as error:
                self._note_failure(error)
                is_admitted = False
            if not is_admitted:
                await self._pause(self._settings.admission_poll_s)

    async def _pause(self, seconds: float) -> None:
        """Ends early at `stop`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()

    async def _admit_one(self) -> bool:
        """Asks for one place, under a new group id each time: an answer that got lost must not be asked for again."""
        rules = self._settings.groups
        group_size = rules.size + rules.redundant_episodes
        candidates = {
            name: Candidate(entry.spec.weight, entry.spec.min_share, can_start=entry.can_start(group_size))
            for name, entry in self._registry.environments.items()
            if not entry.spec.is_paused
        }
        choice = next_environment(candidates, self._credit_by_name)
        if choice is None:
            return False
        name, credit_by_name = choice
        record = await self._ledger.admit(
            group_id=uuid7(),
            environment=name,
            group_size=group_size,
            num_needed=rules.size,
            owner=self._settings.owner,
            lease_ms=self._lease_ms,
        )
        if record is None:
            self._metrics.admissions_refused.inc()
            return False
        if record.environment == name:  # A task that waited to run again is nobody's turn.
            self._credit_by_name = credit_by_name
        self._metrics.groups_admitted.labels(record.environment).inc()
        return await self._start(record, range(record.group_size))

    async def _start(self, record: GroupRecord, sample_indexes: Iterable[int], finished: Iterable[Trajectory] = ()) -> bool:
        """Plays these episodes of a group; False if this process cannot, and the group was given up.

        Args: finished: episodes of it that are recorded.
        """
        environment = self._registry.environments.get(record.environment)
        if environment is None:
            await self._give_up(record)
            return False
        deadline = _now() + self._settings.groups.deadline_s
        group = self._group_by_id.setdefault(record.group_id, RunningGroup(record, deadline))
        group.finished |= {trajectory.sample_index: trajectory for trajectory in finished}
        for index in sample_indexes:
            task = group.tasks[index] = self._tasks.create_task(self._play(group, index, environment))
            task.add_done_callback(functools.partial(self._forget, group, index))
        await asyncio.sleep(0)  # The new episodes claim their places before anyone asks whether there are more.
        self._metrics.episodes_in_flight.set(self.num_episodes_in_flight)
        return True

    async def _give_up(self, record: GroupRecord) -> None:
        """Drops a task of an environment that the run no longer has; one that only this process lacks is left to its lease."""
        _logger.error("group %s needs environment %s, which this process does not have", record.group_id, record.environment)
        if not self._registry.is_registered(record.environment):
            await self._ledger.discard([record.group_id], DiscardReason.ENVIRONMENT_GONE, requeue=False)

    async def _play(self, group: RunningGroup, sample_index: int, environment: RegisteredEnvironment) -> None:
        """One episode, from its place in the environment's bound to its record in the stream."""
        record, loaded = group.record, environment.loaded
        started = time.perf_counter()
        task = loaded.tasks.task(record.task_index)
        identity = EpisodeIdentity(
            run_id=self._settings.run_id,
            trajectory_id=uuid7(),
            group_id=record.group_id,
            group_size=record.group_size,
            sample_index=sample_index,
            attempt=record.attempt,
            environment=record.environment,
            task_id=task.task_id,
        )
        async with environment.slots:
            queued_s = time.perf_counter() - started
            trajectory = await self._agent.run(
                loaded.create,
                loaded.spec,
                task,
                identity,
                reward=loaded.reward,
                queued_s=queued_s,
                before_sampling=lambda: self._note_sampling(group),
                when_cancelled=lambda num_tokens: self._note_waste(group, num_tokens),
            )
        await self._record(group, trajectory)

    async def _note_sampling(self, group: RunningGroup) -> None:
        """Tells the ledger how old a group can be. If Redis is away, its first finished episode tells."""
        if not group.is_sampling:
            group.is_sampling = True
            with contextlib.suppress(*REDIS_AWAY):
                await self._ledger.sampling(group.record.group_id)

    def _note_waste(self, group: RunningGroup, num_tokens: int) -> None:
        if group.ending:
            self._metrics.cancelled_tokens.labels(group.ending).inc(num_tokens)
            self._wasted_tokens[SURPLUS if group.ending == COMPLETE else group.ending] += num_tokens

    async def _record(self, group: RunningGroup, trajectory: Trajectory) -> None:
        """Writes a finished episode, even if its group was lost meanwhile: the ledger knows what to do with it."""
        task = asyncio.current_task()
        assert task is not None
        self._recording.add(task)
        task.add_done_callback(self._recording.discard)
        rules = self._settings.groups
        async with group.lock:
            num_needed = group.num_needed(rules, now=_now())
            verdict = group.verdict(rules, trajectory, now=_now())
            receipt = await self._until_redis_answers(
                lambda: self._ledger.finish(trajectory, num_needed=num_needed, verdict=verdict)
            )
            group.finished[trajectory.sample_index] = trajectory
        self._metrics.count_episode(trajectory, receipt)
        if receipt is Receipt.GONE:
            self._cancel(trajectory.group_id, "gone")
        elif len(group.finished) >= num_needed:
            self._cancel(trajectory.group_id, COMPLETE)
        if receipt is not Receipt.DUPLICATE:
            await self._count(trajectory)

    async def _settle_overdue(self) -> None:
        """Completes groups past their deadline with what they have."""
        rules = self._settings.groups
        while True:
            await asyncio.sleep(self._settings.refresh_s)
            for group in list(self._group_by_id.values()):
                async with group.lock:
                    if group.is_overdue(rules, now=_now()):
                        await self._until_redis_answers(functools.partial(self._settle_group, group))
                        self._cancel(group.record.group_id, COMPLETE)

    async def _settle_group(self, group: RunningGroup) -> None:
        rules, now = self._settings.groups, _now()
        num_needed, verdict = group.num_needed(rules, now=now), group.verdict(rules, now=now)
        await self._ledger.settle(group.record.group_id, num_needed=num_needed, verdict=verdict)

    async def _count(self, trajectory: Trajectory) -> None:
        """Into the run's statistics, which nothing waits for: if Redis is away now, they lack an episode that the books have."""
        with contextlib.suppress(*REDIS_AWAY):
            await self._statistics.add(trajectory)

    def _forget(self, group: RunningGroup, sample_index: int, _: asyncio.Task[None]) -> None:
        group.tasks.pop(sample_index, None)
        if not group.tasks and self._group_by_id.get(group.record.group_id) is group:
            del self._group_by_id[group.record.group_id]
        self._metrics.episodes_in_flight.set(self.num_episodes_in_flight)

    def _cancel(self, group_id: str, reason: str) -> None:
        """Ends what this process still plays of a group that nobody needs any more, requests to the engines included."""
        group = self._group_by_id.pop(group_id, None)
        unneeded = [task for task in group.tasks.values() if task not in self._recording] if group else []
        if group:
            group.ending = reason
        if unneeded:
            self._metrics.groups_cancelled.labels(reason).inc()
        for task in unneeded:
            task.cancel()

    async def _keep_leases(self) -> None:
        while True:
            await self._until_redis_answers(self._renew_leases)
            await asyncio.sleep(self._settings.lease_s / 3)

    async def _renew_leases(self) -> None:
        """Cancels what turns out to be lost."""
        group_ids = list(self._group_by_id)
        for group_id in await self._ledger.renew(owner=self._settings.owner, lease_ms=self._lease_ms, group_ids=group_ids):
            self._cancel(group_id, "lost")

    async def _follow_endings(self) -> None:
        """Cancels at once what the trainer or the ledger no longer needs; what ends before it listens, a renewal finds."""
        while True:
            try:
                async with contextlib.aclosing(self._ledger.endings()) as endings:
                    async for ending in endings:
                        if ending is None:
                            await self._renew_leases()
                        else:
                            self._cancel(ending.group_id, ending.reason)
            except REDIS_AWAY as error:
                self._note_failure(error)
                await asyncio.sleep(_FIRST_BACKOFF_S)
            except NoPermissionError as error:
                _logger.warning("what nobody needs is cancelled at lease renewals only, as Redis refuses SUBSCRIBE: %s", error)
                return

    async def _adopt_expired(self) -> None:
        while not self._stopping.is_set():
            adopted = await self._until_redis_answers(self._adopt)
            if adopted is None:
                await self._pause(self._settings.lease_s / 3)
                continue
            record, finished_indexes = adopted
            self._metrics.groups_adopted.inc()
            # It may be one of this process's own, if Redis was away for longer than a lease.
            own = self._group_by_id.get(record.group_id)
            settled = {*finished_indexes, *(own.tasks if own else ())}
            missing = [index for index in range(record.group_size) if index not in settled]
            finished = await self._until_redis_answers(functools.partial(self._ledger.finished, record, finished_indexes))
            await self._until_redis_answers(functools.partial(self._start, record, missing, finished))

    def _adopt(self) -> Awaitable[tuple[GroupRecord, list[int]] | None]:
        return self._ledger.adopt(owner=self._settings.owner, lease_ms=self._lease_ms)

    async def _follow_registry(self) -> None:
        """Keeps up with what other processes registered, changed or deleted."""
        while True:
            await asyncio.sleep(self._settings.refresh_s)
            await self._until_redis_answers(self._registry.refresh)
            await self._report_waste()
            records = [group.record for group in self._group_by_id.values()]
            gone = [record for record in records if not self._registry.is_registered(record.environment)]
            for record in gone:
                self._cancel(record.group_id, DiscardReason.ENVIRONMENT_GONE)
            for record in gone:
                await self._until_redis_answers(functools.partial(self._give_up, record))

    async def _report_waste(self) -> None:
        if wasted := +self._wasted_tokens:
            self._wasted_tokens.clear()
            await self._until_redis_answers(functools.partial(self._ledger.waste, wasted))

    async def _wait_for_episodes(self) -> None:
        if tasks := self._episode_tasks():
            await asyncio.wait(tasks, timeout=self._settings.grace_s)

    async def _release_leases(self, group_ids: list[str]) -> None:
        """Lets another process adopt these groups at once; if Redis is away, the leases expire by themselves."""
        if group_ids:
            _logger.info("leaving %d groups to other agent processes", len(group_ids))
        with contextlib.suppress(TimeoutError, *REDIS_AWAY):
            async with asyncio.timeout(_RELEASE_TIMEOUT_S):
                await self._ledger.renew(owner=self._settings.owner, lease_ms=0, group_ids=group_ids)

    def _episode_tasks(self) -> list[asyncio.Task[None]]:
        playing = {task for group in self._group_by_id.values() for task in group.tasks.values()}
        return [*playing, *self._recording - playing]

    async def _until_redis_answers(self, call: Callable[[], Awaitable[Answer]]) -> Answer:
        """Repeats a call while Redis is away, so that a finished episode waits for it in memory.

        As many can wait as were admitted before Redis went away, which is the bound of this buffer.
        """
        backoff_s = _FIRST_BACKOFF_S
        while True:
            try:
                answer = await call()
            except REDIS_AWAY as error:
                self._note_failure(error)
            else:
                self._is_redis_away = False
                return answer
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _LONGEST_BACKOFF_S)

    def _note_failure(self, error: Exception) -> None:
        self._metrics.redis_failures.inc()
        if not self._is_redis_away:  # Once, rather than for every episode that waits.
            _logger.warning("Redis is away; finished episodes wait for it: %s", error)
        self._is_redis_away = True


def _now() -> float:
    """Seconds on the event loop's clock."""
    return asyncio.get_running_loop().time()
