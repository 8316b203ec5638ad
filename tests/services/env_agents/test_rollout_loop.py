import asyncio
import contextlib
import math
from collections import Counter, defaultdict

import pytest
import redis
import redis.asyncio

from services.env_agents.environment import Environment
from services.env_agents.episode_statistics import RunStatistics
from services.env_agents.group_filters import zero_variance
from services.env_agents.holds import held
from services.env_agents.loading import EnvironmentLoader
from services.env_agents.metrics import AgentMetrics
from services.env_agents.registry import EnvironmentRegistry
from services.env_agents.rollout_loop import REDIS_AWAY, RolloutLoop, RolloutSettings
from services.env_agents.running_group import GroupRules
from shared import trajectory as trajectories
from shared.environment_spec import EnvironmentLimits, EnvironmentSpec
from shared.ledger import AdmissionLedger, DiscardReason, TrainingLedger
from shared.redis_connections import keep_cancellations
from shared.trajectory import Outcome

GROUP_SIZE = 4
BATCH_GROUPS = 2
ALL_EPISODES = GroupRules(GROUP_SIZE)


async def wait_until(predicate, *, description: str) -> None:
    """Polls for at most 60 s."""
    try:
        async with asyncio.timeout(60):
            while not predicate():  # noqa: ASYNC110 - what it waits for is in Redis
                await asyncio.sleep(0.01)
    except TimeoutError:
        pytest.fail(f"waited in vain until {description}")


async def eventually(is_true, *, description: str) -> None:
    """Asks for at most 60 s."""
    try:
        async with asyncio.timeout(60):
            while not await is_true():  # noqa: ASYNC110 - what it waits for is in Redis
                await asyncio.sleep(0.01)
    except TimeoutError:
        pytest.fail(f"waited in vain until {description}")


class Gate:
    """Environments wait here before they answer."""

    def __init__(self) -> None:
        self._num_left = math.inf
        self._is_open = asyncio.Event()

    def let(self, num_episodes: float) -> None:
        """So many may pass from now on."""
        self._num_left = num_episodes
        self._is_open.set()

    async def wait(self) -> None:
        while self._num_left <= 0:
            self._is_open.clear()
            await self._is_open.wait()
        self._num_left -= 1


@pytest.fixture
def gate():
    return Gate()


@pytest.fixture
def started():
    return []


@pytest.fixture
def loader(http_session, renderer, client, gate, started, monkeypatch):
    """Loads as ever, but each environment's class is the test's own."""

    class Gated(Environment):
        async def reset(self, task):
            started.append(task.seed)
            return [{"role": "user", "content": f"seed {task.seed}"}]

        async def score(self, answer):
            await gate.wait()
            return 1.0

    loader = EnvironmentLoader(http_session, renderer, client, import_allowlist=("examples",), seed=0)
    monkeypatch.setattr("services.env_agents.loading.import_environment", lambda *_: Gated)
    return loader


@pytest.fixture
def ledger(redis_async, keys):
    return AdmissionLedger(redis_async, keys)


@pytest.fixture
def training(redis_client, keys):
    ledger = TrainingLedger(redis_client, keys)
    ledger.create_consumer_group()
    return ledger


@pytest.fixture
async def run_loop(redis_async, keys, loader, agent, ledger):
    """Starts RolloutLoops that share a ledger and stops them at the end."""
    await ledger.configure(async_generation_ratio=1.0, batch_groups=BATCH_GROUPS)
    running: list[tuple[RolloutLoop, asyncio.Task]] = []

    async def start(owner="one", *, lease_s=30.0, ledger=ledger, grace_s=0.0, groups=ALL_EPISODES):
        registry = EnvironmentRegistry(redis_async, keys, loader)
        await registry.refresh()
        settings = RolloutSettings("run", owner, groups, lease_s, admission_poll_s=0.01, refresh_s=0.05, grace_s=grace_s)
        statistics = RunStatistics(redis_async, keys, process=owner)
        loop = RolloutLoop(settings, ledger, registry, agent, AgentMetrics(), statistics)
        task = asyncio.create_task(loop.run())
        running.append((loop, task))
        return loop, registry, task

    yield start
    for loop, task in running:
        loop.stop()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@pytest.fixture
async def register(redis_async, keys, loader):
    async def register(name="test", **fields):
        registry = EnvironmentRegistry(redis_async, keys, loader)
        await registry.register(EnvironmentSpec(name=name, import_path="examples.calculator:Calculator", **fields))
        return registry

    return register


@pytest.fixture
def records(redis_client, keys):
    return lambda: [trajectories.decode(fields[b"trajectory"]) for _, fields in redis_client.xrange(keys.trajectories)]


async def test_admits_exactly_what_the_ratio_allows_and_records_every_episode(run_loop, register, training, records):
    await register()
    await run_loop()
    await wait_until(lambda: training.books().ready == 2 * BATCH_GROUPS, description="four groups are ready")
    assert training.books().is_balanced
    by_group = defaultdict(list)
    for record in records():
        assert (record.outcome, record.run_id, record.group_size) == (Outcome.COMPLETED, "run", GROUP_SIZE)
        by_group[record.group_id].append(record)
    assert all(sorted(record.sample_index for record in group) == list(range(GROUP_SIZE)) for group in by_group.values())
    assert all(len({record.task_id for record in group}) == 1 for group in by_group.values())
    assert {group[0].task_id for group in by_group.values()} == {"0", "1", "2", "3"}


async def test_new_version_opens_new_places(run_loop, register, training, records):
    await register()
    await run_loop()
    await wait_until(lambda: training.books().ready == 4, description="the first groups are ready")
    training.publish(1, [record.group_id for record in records()][0:1])
    await wait_until(lambda: training.books().started == 6, description="B more groups start")


async def test_failed_episodes_are_recorded_and_siblings_go_on(run_loop, register, hub, training, records):
    answers = iter(range(1000))
    hub.policy = lambda _: "x" * 50 if next(answers) % 2 else "42<|im_end|>"
    await register(limits=EnvironmentLimits(max_tokens=60))
    await run_loop()
    await wait_until(lambda: training.books().ready == 4, description="all groups end")
    assert Counter(record.outcome for record in records()) == {Outcome.COMPLETED: 8, Outcome.TRUNCATED: 8}


async def test_two_processes_share_the_ledgers_places(run_loop, register, training, records):
    await register()
    await run_loop("one")
    await run_loop("two")
    await wait_until(lambda: training.books().ready == 4, description="all groups end")
    assert training.books().started == 4
    assert len({(record.group_id, record.sample_index) for record in records()}) == len(records()) == 16


async def test_groups_of_a_process_that_died_are_adopted_and_only_missing_episodes_run(
    run_loop, register, training, records, gate, started
):
    await register(limits=EnvironmentLimits(max_concurrent_episodes=1))
    gate.let(2)
    _, _, task = await run_loop("dies", lease_s=0.3)
    await wait_until(lambda: len(records()) == 2 and len(started) == 3, description="two have ended, one is in the middle")
    finished = {record.trajectory_id for record in records()}
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    gate.let(math.inf)
    await run_loop("lives", lease_s=0.3)
    await wait_until(lambda: training.books().ready == 4, description="every group is complete")
    assert finished <= {record.trajectory_id for record in records()}
    assert len({(record.group_id, record.sample_index) for record in records()}) == len(records()) == 16
    assert training.books().is_balanced
    assert sorted(record.attempt for record in records())[-2:] == [1, 1], "the two that were missing"
    assert len(started) == 17, "only the one in the middle began twice"


async def test_stopping_leaves_running_groups_to_others_at_once(run_loop, register, training, records, gate):
    await register()
    gate.let(0)
    loop, _, task = await run_loop("stops", lease_s=3600)
    await wait_until(lambda: loop.num_episodes_in_flight == 16, description="everything runs")
    loop.stop()
    await task
    assert training.books().running == 4
    gate.let(math.inf)
    await run_loop("lives", lease_s=3600)
    await wait_until(lambda: training.books().ready == 4, description="adopted without waiting for the lease")
    assert len(records()) == 16


class SlowAdoption(AdmissionLedger):
    """An adoption whose answer is late. `is_deaf`: it then swallows a cancellation, as `wait_for` of Python 3.11 can."""

    def __init__(self, client, keys, *, is_deaf: bool):
        super().__init__(client, keys)
        self.has_adopted = False
        self.answering = asyncio.Event()
        self._is_deaf = is_deaf

    async def adopt(self, *, owner, lease_ms):
        adopted = await super().adopt(owner=owner, lease_ms=lease_ms)
        if adopted is not None:
            self.has_adopted = True
            try:
                await self.answering.wait()
            except asyncio.CancelledError:
                if not self._is_deaf:
                    raise
        return adopted


@pytest.mark.parametrize("is_answered", [True, False])
async def test_group_adopted_while_the_process_stops_is_left_to_others_too(
    run_loop, register, training, redis_async, keys, gate, ledger, is_answered
):
    await ledger.configure(async_generation_ratio=0.0, batch_groups=1)
    await register()
    gate.let(0)
    await ledger.admit(group_id="g", environment="test", group_size=GROUP_SIZE, owner="dead", lease_ms=0)
    slow = SlowAdoption(redis_async, keys, is_deaf=not is_answered)
    loop, _, task = await run_loop("stops", lease_s=3600, ledger=slow)
    await wait_until(lambda: slow.has_adopted, description="it has taken over the group of the dead process")
    loop.stop()
    if is_answered:
        slow.answering.set()
    await task
    assert loop.num_episodes_in_flight == 0
    gate.let(math.inf)
    await run_loop("lives", lease_s=3600)
    await wait_until(lambda: training.books().ready == 1, description="adopted without waiting for the lease")


async def test_stopping_lets_short_episodes_end(run_loop, register, training, gate):
    await register()
    gate.let(0)
    loop, _, task = await run_loop(grace_s=10.0)
    await wait_until(lambda: loop.num_episodes_in_flight == 16, description="everything runs")
    loop.stop()
    gate.let(math.inf)
    await task
    assert training.books().ready == 4


async def test_lost_groups_are_cancelled(run_loop, register, training, redis_client, keys, gate, ledger):
    await register()
    gate.let(0)
    loop, _, _ = await run_loop(lease_s=0.3)
    await wait_until(lambda: loop.num_episodes_in_flight == 16, description="everything runs")
    groups = [group_id.decode() for group_id in redis_client.hkeys(keys.groups)]
    training.discard(groups[:3], DiscardReason.STALE, requeue=False)
    await wait_until(lambda: not loop._group_by_id.keys() & set(groups[:3]), description="discarded groups are gone here too")


async def test_episodes_of_a_discarded_group_end_at_once_with_their_requests_to_the_engines(
    run_loop, register, training, redis_client, keys, hub
):
    never = asyncio.Event()

    async def stuck(_):
        await never.wait()
        return "42<|im_end|>"

    hub.policy = stuck
    await register()
    loop, _, _ = await run_loop(lease_s=3600)
    await wait_until(lambda: len(hub.transports) == 16, description="every episode waits for the engine")
    first, groups = list(hub.transports), [group_id.decode() for group_id in redis_client.hkeys(keys.groups)]
    training.discard(groups, DiscardReason.STALE, requeue=False)
    await wait_until(lambda: not loop._group_by_id.keys() & set(groups), description="they are gone without a lease's help")
    await wait_until(lambda: all(transport.is_closing() for transport in first), description="their requests are closed")
    never.set()


async def test_endings_are_followed_again_after_redis_was_away(run_loop, register, training, redis_client, redis_url, keys, gate):
    await register()
    gate.let(0)
    loop, _, _ = await run_loop(lease_s=3600)
    await wait_until(lambda: loop.num_episodes_in_flight == 16, description="everything runs")
    with redis.Redis.from_url(redis_url, username="operator", password="") as operator:
        operator.client_kill_filter(_type="pubsub")
    await wait_until(lambda: redis_client.pubsub_numsub(keys.endings)[0][1] == 1, description="it listens again")
    [group_id, *_] = [group_id.decode() for group_id in redis_client.hkeys(keys.groups)]
    training.discard([group_id], DiscardReason.STALE, requeue=False)
    await wait_until(lambda: group_id not in loop._group_by_id, description="it heard of it")


async def test_a_redis_user_without_channels_cancels_at_lease_renewals(
    run_loop, register, training, redis_client, redis_url, keys, gate
):
    async with redis.asyncio.Redis.from_url(redis_url, username="narrow", password="") as client:
        keep_cancellations(client.connection_pool)
        await register()
        gate.let(0)
        loop, _, task = await run_loop(lease_s=0.3, ledger=AdmissionLedger(client, keys))
        await wait_until(lambda: loop.num_episodes_in_flight == 16, description="everything runs")
        [group_id, *_] = [group_id.decode() for group_id in redis_client.hkeys(keys.groups)]
        assert await loop._ledger.discard([group_id], DiscardReason.STALE, requeue=False) == 1
        assert training.books().is_balanced
        await wait_until(lambda: group_id not in loop._group_by_id, description="the lease told")
        loop.stop()
        await task


async def test_the_ledger_knows_from_when_on_a_group_samples(run_loop, register, training, gate):
    await register()
    gate.let(0)
    await run_loop()

    def do_sample():
        running = training.live_groups().running
        return len(running) == 4 and all(record.sampling_version == 0 for record in running)

    await wait_until(do_sample, description="all sample")


async def test_requeued_tasks_run_before_new_ones(run_loop, register, training, redis_client, keys, gate, records):
    await register()
    gate.let(0)
    loop, _, _ = await run_loop(lease_s=0.3)
    await wait_until(lambda: loop.num_episodes_in_flight == 16, description="everything runs")
    group_id = redis_client.hkeys(keys.groups)[0].decode()
    training.discard([group_id], DiscardReason.STALE, requeue=True)
    gate.let(math.inf)
    await wait_until(lambda: training.books().ready == 4, description="all groups end")
    assert {record.task_id for record in records()} == {"0", "1", "2", "3"}


async def test_a_group_is_complete_with_the_first_episodes_and_the_redundant_ones_are_cancelled(
    run_loop, register, training, records, gate, ledger
):
    await ledger.configure(async_generation_ratio=0.0, batch_groups=1)
    await register()
    gate.let(GROUP_SIZE)
    loop, _, _ = await run_loop(lease_s=3600, groups=GroupRules(GROUP_SIZE, redundant_episodes=2))
    await wait_until(lambda: training.books().ready == 1, description="the group is complete")
    await wait_until(lambda: loop.num_episodes_in_flight == 0, description="the other two are cancelled")
    assert len(records()) == GROUP_SIZE
    assert {record.group_size for record in records()} == {GROUP_SIZE + 2}
    assert training.books().episodes_surplus == 2
    each = records()[0].num_sampled_tokens
    assert each > 0
    await wait_until(lambda: training.books().discarded_tokens == {"surplus": 2 * each}, description="their tokens are counted")


async def test_a_group_past_its_deadline_is_complete_with_what_it_has(run_loop, register, training, records, gate, ledger):
    await ledger.configure(async_generation_ratio=0.0, batch_groups=1)
    await register()
    gate.let(2)
    loop, _, _ = await run_loop(lease_s=3600, groups=GroupRules(GROUP_SIZE, deadline_s=0.3, min_size=2))
    await wait_until(lambda: training.books().ready == 1, description="two of four are enough")
    await wait_until(lambda: loop.num_episodes_in_flight == 0, description="the other two are cancelled")
    assert len(records()) == 2


async def test_a_group_past_its_deadline_waits_for_the_fewest_it_can_be_trained_with(
    run_loop, register, training, records, gate, ledger
):
    await ledger.configure(async_generation_ratio=0.0, batch_groups=1)
    await register()
    gate.let(1)
    await run_loop(lease_s=3600, groups=GroupRules(GROUP_SIZE, deadline_s=0.1, min_size=2))
    await wait_until(lambda: len(records()) == 1, description="one has ended")
    await asyncio.sleep(0.3)
    assert training.books().running == 1
    gate.let(1)
    await wait_until(lambda: training.books().ready == 1, description="the second one completes it")
    assert len(records()) == 2


async def test_a_filtered_group_s_place_comes_back_at_once(run_loop, register, training, records):
    """Every reward is 1."""
    await register()
    loop, _, _ = await run_loop(groups=GroupRules(GROUP_SIZE, filters={"zero_variance": zero_variance}))
    await wait_until(lambda: training.books().started > 12, description="places come back")
    loop.stop()
    books = training.books()
    assert (books.ready, set(books.discarded)) == (0, {"filtered:zero_variance"})
    assert books.is_balanced


async def test_an_adopted_group_is_filtered_by_all_of_its_episodes(run_loop, register, training, records, gate, ledger):
    await ledger.configure(async_generation_ratio=0.0, batch_groups=1)
    await register()
    gate.let(2)
    _, _, task = await run_loop("dies", lease_s=0.3)
    await wait_until(lambda: len(records()) == 2, description="two have ended")
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    seen = []
    gate.let(math.inf)
    await run_loop("lives", lease_s=0.3, groups=GroupRules(GROUP_SIZE, filters={"look": lambda group: seen.append(len(group))}))
    await wait_until(lambda: training.books().ready == 1, description="the group is complete")
    assert seen == [GROUP_SIZE]


class FlakyLedger(AdmissionLedger):
    """Loses its connection to Redis for a while, before or after the command was carried out."""

    def __init__(self, client, keys):
        super().__init__(client, keys)
        self.is_away = False
        self.answers_to_lose = 0
        self.num_failures = 0

    async def _run(self, name, *arguments):
        if self.is_away:
            self.num_failures += 1
            raise redis.ConnectionError("connection refused")
        answer = await super()._run(name, *arguments)
        if self.answers_to_lose:
            self.answers_to_lose -= 1
            raise redis.ConnectionError("connection reset")
        return answer


async def test_finished_episodes_wait_for_redis_to_come_back(
    run_loop, register, redis_async, redis_client, keys, training, gate, records
):
    await register()
    gate.let(0)
    flaky = FlakyLedger(redis_async, keys)
    loop, _, _ = await run_loop(lease_s=0.2, ledger=flaky)
    await wait_until(lambda: loop.num_episodes_in_flight == 16, description="everything runs")
    flaky.is_away = True
    gate.let(math.inf)
    await wait_until(lambda: flaky.num_failures > 40, description="writes have failed")
    last_expiry_ms = redis_client.zrange(keys.running, -1, -1, withscores=True)[0][1]
    await wait_until(lambda: 1000 * redis_client.time()[0] > last_expiry_ms, description="leases have expired")
    flaky.is_away = False
    await wait_until(lambda: training.books().ready == 4, description="all were written")
    assert len(records()) == 16
    assert training.books().is_balanced


async def test_admission_whose_answer_was_lost_is_not_counted_twice(run_loop, register, redis_async, keys, training):
    await register()
    flaky = FlakyLedger(redis_async, keys)
    flaky.answers_to_lose = 3
    await run_loop(lease_s=0.3, ledger=flaky)
    await wait_until(lambda: training.books().ready == 4, description="lost admissions were adopted and ran")
    assert training.books().started == 4
    assert training.books().is_balanced


async def test_deleted_environments_groups_are_cancelled_and_counted(run_loop, register, training, gate):
    registry = await register()
    gate.let(0)
    loop, _, _ = await run_loop()
    await wait_until(lambda: loop.num_episodes_in_flight == 16, description="everything runs")
    await registry.delete("test")
    await wait_until(lambda: training.books().discarded, description="the first of its groups is discarded")
    assert loop.num_episodes_in_flight == 0, "no episode of it runs on while the books are brought up to date"
    # One more may be admitted while it is being deleted.
    await wait_until(lambda: training.books().running == 0, description="all of its groups are discarded")
    books = training.books()
    assert (set(books.discarded), books.discarded["environment_gone"]) == ({"environment_gone"}, books.started)
    assert books.is_balanced


async def test_processes_are_known_while_they_run_and_not_afterwards(run_loop, register, ledger, gate):
    await register()
    gate.let(0)
    busy, _, task = await run_loop("busy")
    await wait_until(lambda: busy.num_episodes_in_flight == 16, description="everything runs")
    await run_loop("idle")

    async def are_known():
        return await ledger.processes() == {"busy": 16, "idle": 0}

    await eventually(are_known, description="both are known")
    busy.stop()
    await task
    assert "busy" not in await ledger.processes()


async def test_episodes_count_in_the_runs_statistics(run_loop, register, training, redis_async, keys):
    await register()
    await run_loop("one")
    await run_loop("two")
    await wait_until(lambda: training.books().ready == 4, description="all groups end")
    anyone = RunStatistics(redis_async, keys, process="three")

    async def is_counted():
        return (await anyone.read(["test"]))["test"].statistics.outcomes == {Outcome.COMPLETED: 16}

    await eventually(is_counted, description="every episode is in the statistics")


async def test_environment_registered_later_gets_its_share(run_loop, register, training, records):
    await run_loop()
    await register("a", weight=3.0)
    await wait_until(lambda: training.books().ready == 4, description="it started by itself")
    assert {record.environment for record in records()} == {"a"}


async def test_shares_follow_the_weights(run_loop, register, training, records, ledger):
    await register("a", weight=3.0)
    await register("b", weight=1.0)
    await ledger.configure(async_generation_ratio=1.0, batch_groups=8)
    await run_loop()
    await wait_until(lambda: training.books().ready >= 16, description="sixteen groups end")
    by_environment = Counter({record.group_id: record.environment for record in records()}.values())
    assert by_environment == {"a": 12, "b": 4}


async def test_minimum_share_is_kept_against_the_weights(run_loop, register, training, records, ledger):
    await register("a", weight=1.0, min_share=0.25)
    await register("b", weight=99.0)
    await ledger.configure(async_generation_ratio=1.0, batch_groups=8)
    await run_loop()
    await wait_until(lambda: training.books().ready >= 16, description="sixteen groups end")
    assert Counter({record.group_id: record.environment for record in records()}.values()) == {"a": 4, "b": 12}


async def test_paused_environment_starts_nothing_until_it_is_resumed(run_loop, register, training):
    registry = await register(is_paused=True)
    await run_loop()
    await registry.patch("test", {"weight": 2.0})
    assert training.books().started == 0
    await registry.patch("test", {"is_paused": False})
    await wait_until(lambda: training.books().ready == 4, description="it started")


async def test_nothing_new_starts_in_any_process_during_a_hold(run_loop, register, training, redis_client, keys, gate, ledger):
    await register()
    gate.let(0)
    loop, _, _ = await run_loop("one")
    await run_loop("two")
    await wait_until(lambda: training.books().running == 4, description="everything runs")
    async with held(ledger, lease_s=0.3, passing=REDIS_AWAY):
        gate.let(math.inf)
        await wait_until(lambda: training.books().ready == 4, description="running groups end")
        training.publish(1, [group_id.decode() for group_id in redis_client.zrange(keys.ready, 0, -1)])
        await asyncio.sleep(0.5)
        assert not await loop._admit_one()
        assert (training.books().started, training.books().holds) == (4, 1), "renewed beyond its lease"
    await wait_until(lambda: training.books().started > 4, description="it goes on")


async def test_a_hold_of_a_process_that_died_ends_with_its_lease(run_loop, register, training, ledger):
    await register()
    await ledger.hold("dead", lease_ms=300)
    await run_loop()
    assert training.books().started == 0
    await wait_until(lambda: training.books().started == 4, description="it goes on")


async def test_concurrent_episodes_stay_within_the_environments_bound(run_loop, register, gate, started, training):
    await register(limits=EnvironmentLimits(max_concurrent_episodes=2))
    gate.let(0)
    await run_loop()
    await wait_until(lambda: len(started) == 2, description="two episodes run")
    assert training.books().running == 1, "a second group must not take a lease only to wait"
    gate.let(math.inf)
    await wait_until(lambda: training.books().ready == 4, description="all groups end")
