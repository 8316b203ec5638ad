"""The trainer's inlet on a real Redis: what is waited for, given up, read again."""

import itertools

import msgspec
import pytest
import redis
import redis.asyncio

from shared.configuration import RolloutSection
from shared.errors import TrainingError
from shared.ledger import AdmissionLedger, TrainingLedger
from shared.stream import TrajectoryConsumer
from shared.trajectory import Outcome
from tests.trainer.records import recorded, trajectory
from trainer.rollouts import RolloutReader

ROLLOUT = RolloutSection(rollout_batch_size=2, num_return_sequences_in_group=2, async_generation_ratio=1.0)


class Agents:
    """The agents' side of the books, synchronously enough for these tests."""

    def __init__(self, client, keys):
        self.ledger = AdmissionLedger(client, keys)
        self.count = 0

    async def start(self, size=2):
        await self.ledger.configure(async_generation_ratio=1.0, batch_groups=2)
        self.count += 1
        group = await self.ledger.admit(
            group_id=f"g{self.count}", environment="test", group_size=size, owner="agents", lease_ms=60_000
        )
        assert group is not None
        return group

    async def finish(self, group, *, version=0, indexes=(0, 1)):
        for index in indexes:
            await self.ledger.finish(recorded(group, index, reward=float(index), version=version))


@pytest.fixture
async def agents(redis_url, keys):
    async with redis.asyncio.Redis.from_url(redis_url) as client:
        yield Agents(client, keys)


@pytest.fixture
def ledger(redis_client, keys):
    ledger = TrainingLedger(redis_client, keys)
    ledger.create_consumer_group()
    return ledger


@pytest.fixture
def new_reader(redis_client, keys, ledger):
    def make(rollout=ROLLOUT, timeout_s=0.0):
        return RolloutReader(TrajectoryConsumer(redis_client, keys, ledger), ledger, rollout, timeout_s=timeout_s)

    return make


def batch_of(reader, version=0, is_stopped=lambda: False):
    selection = reader.next_batch(version, progress=lambda ready, needed: None, is_stopped=is_stopped)
    return selection and [group.group_id for group in selection.batch]


async def test_a_batch_is_the_oldest_groups_in_the_order_they_started(agents, new_reader):
    first, second, third = [await agents.start() for _ in range(3)]
    for group in (third, second, first):
        await agents.finish(group)
    assert batch_of(new_reader(timeout_s=30)) == [first.group_id, second.group_id]


async def test_what_an_earlier_trainer_read_and_did_not_acknowledge_is_read_again(agents, new_reader):
    for _ in range(2):
        await agents.finish(await agents.start())
    assert batch_of(new_reader(timeout_s=30)) == batch_of(new_reader(timeout_s=30)) == ["g1", "g2"]


async def test_published_groups_do_not_come_back_when_entries_are_read_again(agents, new_reader, ledger):
    for _ in range(4):
        await agents.finish(await agents.start())
    reader = new_reader(timeout_s=30)
    assert batch_of(reader) == ["g1", "g2"]
    ledger.publish(1, ["g1", "g2"])
    reader._must_reread = True
    assert batch_of(reader, version=1) == ["g3", "g4"]


async def test_groups_trained_after_the_checkpoint_train_again(agents, new_reader, ledger):
    for _ in range(2):
        await agents.finish(await agents.start())
    assert batch_of(new_reader(timeout_s=30)) == ["g1", "g2"]
    ledger.publish(1, ["g1", "g2"])
    ledger.restore(0)
    assert batch_of(new_reader(timeout_s=30)) == ["g1", "g2"]


async def test_a_stale_group_is_discarded_and_its_task_runs_again(agents, new_reader, ledger):
    await agents.finish(await agents.start(), version=0)
    with pytest.raises(TrainingError):
        batch_of(new_reader(), version=2)
    books = ledger.books()
    assert (books.discarded, books.requeued, books.ready) == ({"stale": 1}, 1, 0)
    assert books.is_balanced


async def test_a_dropped_stale_group_does_not_run_again(agents, new_reader, ledger):
    await agents.finish(await agents.start(), version=0)
    rollout = RolloutSection(rollout_batch_size=2, num_return_sequences_in_group=2, on_stale="drop")
    with pytest.raises(TrainingError):
        batch_of(new_reader(rollout), version=2)
    books = ledger.books()
    assert (books.discarded, books.requeued) == ({"stale": 1}, 0)


class Clock:
    """Seconds that pass only when the trainer looks."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        self.now += 1.0
        return self.now


async def test_waiting_for_a_straggler_ends_when_it_is_ready_or_the_deadline_passes(agents, new_reader, ledger, monkeypatch):
    rollout = RolloutSection(rollout_batch_size=2, num_return_sequences_in_group=2, on_stale="wait", stale_wait_s=3.0)
    straggler = await agents.start()
    await agents.ledger.sampling(straggler.group_id)
    ledger.publish(1, [])
    for _ in range(2):
        await agents.finish(await agents.start(), version=1)
    monkeypatch.setattr("trainer.rollouts.time", Clock())
    assert batch_of(new_reader(rollout, timeout_s=30), version=1) == ["g2", "g3"], "after the deadline"
    await agents.finish(straggler, version=0)
    assert batch_of(new_reader(rollout, timeout_s=30), version=1) == ["g1", "g2"]


async def test_what_became_stale_with_an_update_is_given_up_at_once(agents, new_reader, ledger):
    samples, waits = await agents.start(), await agents.start()
    await agents.ledger.sampling(samples.group_id)
    for version in (1, 2):
        ledger.publish(version, [])
        new_reader(msgspec.structs.replace(ROLLOUT, on_stale="regenerate")).give_up_stale(version)
    assert [record.group_id for record in ledger.live_groups().running] == [waits.group_id]
    assert ledger.books().discarded == {"stale": 1}


async def test_a_group_whose_environment_broke_is_discarded_and_runs_again(agents, new_reader, ledger):
    group = await agents.start()
    await agents.finish(group, indexes=[0])
    broken = trajectory([0, 1], group_id=group.group_id, sample_index=1, outcome=Outcome.ENVIRONMENT_ERROR)
    await agents.ledger.finish(broken)
    with pytest.raises(TrainingError):
        batch_of(new_reader())
    assert ledger.books().discarded == {"failed": 1}


async def test_a_record_that_nobody_can_read_does_not_stall_training(agents, new_reader, ledger, redis_client, keys):
    for _ in range(3):
        await agents.finish(await agents.start())
    entry_id, fields = redis_client.xrange(keys.trajectories, count=1)[0]
    redis_client.xdel(keys.trajectories, entry_id)
    redis_client.xadd(keys.trajectories, {**fields, b"trajectory": b"\xc1"})
    assert batch_of(new_reader(timeout_s=30)) == ["g2", "g3"]
    assert (ledger.books().dead_letters, ledger.books().discarded) == (1, {"unreadable": 1})


async def test_a_group_that_completed_early_is_trained_with_the_episodes_it_has(agents, new_reader):
    for _ in range(2):
        group = await agents.start(size=4)
        await agents.finish(group)
        await agents.ledger.settle(group.group_id, num_needed=2, verdict="")
    assert batch_of(new_reader(timeout_s=30)) == ["g1", "g2"]


async def test_a_filter_that_discards_everything_stops_training_with_the_reason(agents, new_reader, ledger):
    rollout = RolloutSection(rollout_batch_size=2, num_return_sequences_in_group=2, max_filtered_groups=3)
    for _ in range(3):
        group = await agents.start()
        await agents.finish(group, indexes=[0])
        await agents.ledger.finish(recorded(group, 1), verdict="zero_variance")
    with pytest.raises(TrainingError, match=r"max_filtered_groups=3 .* discarded 3 \(in all: 3 by zero_variance\); rewards"):
        batch_of(new_reader(rollout, timeout_s=3600))
    ledger.restore(0)
    assert ledger.books().filtered_in_a_row == 0, "a trainer that starts again counts anew"


async def test_a_batch_that_no_admission_can_fill_stops_training_with_the_reason(agents, new_reader):
    await agents.start()
    rollout = RolloutSection(rollout_batch_size=5, num_return_sequences_in_group=2)
    with pytest.raises(TrainingError, match="the trainer's 5 groups can never be ready at once: the agents have 2 and α = 1"):
        batch_of(new_reader(rollout, timeout_s=3600))


async def test_a_batch_that_does_not_come_says_where_the_episodes_are(agents, new_reader):
    await agents.finish(await agents.start())
    await agents.start()
    with pytest.raises(TrainingError, match=r"1 groups are ready, 1 run, 0 wait .* GET /status of the hub and of the agents"):
        batch_of(new_reader())


def test_a_run_without_episodes_says_so(new_reader):
    with pytest.raises(TrainingError, match="no episode ever started"):
        batch_of(new_reader())


def test_waiting_ends_when_asked_to_stop(new_reader):
    assert batch_of(new_reader(timeout_s=3600), is_stopped=lambda: True) is None


async def test_a_lost_connection_loses_no_delivered_entry(agents, new_reader, monkeypatch):
    """Redis counts entries as delivered although the reply that carried them never arrived."""
    for _ in range(2):
        await agents.finish(await agents.start())
    reader = new_reader(timeout_s=30)
    read = TrajectoryConsumer.read
    fail = [True]

    def read_and_lose_the_reply(consumer, *, block_ms):
        deliveries = read(consumer, block_ms=block_ms)
        if fail.pop() if fail else False:
            raise redis.ConnectionError("connection reset")
        return deliveries

    monkeypatch.setattr(TrajectoryConsumer, "read", read_and_lose_the_reply)
    assert batch_of(reader) == ["g1", "g2"]


def test_a_redis_that_lost_the_run_is_a_sentence(new_reader, redis_client, keys):
    redis_client.delete(keys.trajectories)
    with pytest.raises(TrainingError, match="has lost them"):
        batch_of(new_reader(timeout_s=30))


async def test_time_in_which_no_engine_serves_does_not_count_as_waiting(agents, new_reader):
    pauses = itertools.chain([True] * 8, itertools.repeat(False))
    asked = []

    def is_paused():
        asked.append(None)
        return next(pauses)

    with pytest.raises(TrainingError, match="must be ready within"):
        new_reader(timeout_s=2.0).next_batch(0, progress=lambda *_: None, is_stopped=lambda: False, is_paused=is_paused)
    assert len(asked) > 8, "the deadline began anew with each of them"
