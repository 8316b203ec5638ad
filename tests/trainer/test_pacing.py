"""Admission and staleness together, on the real ledger: paced by α, timely groups are all trained, and none beyond the bound."""

import math
import random

import pytest
import redis.asyncio

from shared import versions
from shared.configuration import RolloutSection
from shared.ledger import AdmissionLedger, DiscardReason, TrainingLedger
from shared.stream import TrajectoryConsumer
from tests.trainer.records import recorded
from trainer.rollouts import RolloutReader

BATCH_GROUPS, GROUP_SIZE, NUM_UPDATES = 4, 2, 12


class Schedule:
    """Agents that take every place at once and sample at the version in force, and a trainer that updates as soon as it can."""

    def __init__(self, agents, training, reader):
        self.agents, self.training, self.reader = agents, training, reader
        self.version, self.count = 0, 0
        self.running = []
        self.lags = []

    async def admit(self):
        while group := await self.agents.admit(
            group_id=f"g{self.count}", environment="test", group_size=GROUP_SIZE, owner="agents", lease_ms=60_000
        ):
            self.count += 1
            self.running.append((group, self.version))

    async def finish(self, groups):
        for group, version in groups:
            self.running.remove((group, version))
            for index in range(GROUP_SIZE):
                await self.agents.finish(recorded(group, index, reward=float(index), version=version))

    def update(self):
        batch = self.reader.next_batch(self.version, progress=lambda *_: None, is_stopped=lambda: False).batch
        self.lags += [versions.lag(self.version, group.oldest_version) for group in batch]
        self.version += 1
        self.training.publish(self.version, [group.group_id for group in batch])
        self.training.acknowledge(self.version)


@pytest.fixture
async def schedule(redis_url, redis_client, keys):
    training = TrainingLedger(redis_client, keys)
    training.create_consumer_group()
    rollout = RolloutSection(rollout_batch_size=BATCH_GROUPS, num_return_sequences_in_group=GROUP_SIZE)
    reader = RolloutReader(TrajectoryConsumer(redis_client, keys, training), training, rollout, timeout_s=5)
    async with redis.asyncio.Redis.from_url(redis_url) as client:
        yield Schedule(AdmissionLedger(client, keys), training, reader)


@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0, 1.5, 2.0])
@pytest.mark.parametrize("is_generation_fast", [True, False])
async def test_no_timely_group_is_stale_and_the_bound_is_reached(schedule, ratio, is_generation_fast):
    """Groups finish at once, or only just in time for their turn and in any order."""
    shuffled = random.Random(0)
    await schedule.agents.configure(async_generation_ratio=ratio, batch_groups=BATCH_GROUPS)
    for _ in range(NUM_UPDATES):
        await schedule.admit()
        due = list(schedule.running) if is_generation_fast else schedule.running[:BATCH_GROUPS]
        shuffled.shuffle(due)
        await schedule.finish(due)
        schedule.update()
    books = schedule.training.books()
    assert (books.discarded, books.trained) == ({}, NUM_UPDATES * BATCH_GROUPS)
    assert max(schedule.lags) == versions.max_lag(ratio)
    in_steady_state = schedule.lags[math.ceil(ratio) * BATCH_GROUPS :]
    assert sum(in_steady_state) / len(in_steady_state) == pytest.approx(ratio, abs=1e-9)


async def test_a_ratio_lowered_while_the_run_goes_on_bounds_what_was_started_before(schedule):
    await schedule.agents.configure(async_generation_ratio=2.0, batch_groups=BATCH_GROUPS)
    await schedule.admit()
    await schedule.finish(list(schedule.running))
    schedule.update()
    await schedule.agents.set_ratio(0.0)
    await schedule.admit()
    assert schedule.running == [], "two batches wait already"
    schedule.reader.next_batch(schedule.version, progress=lambda *_: None, is_stopped=iter([False, True]).__next__)
    assert schedule.training.books().discarded == {"stale": 2 * BATCH_GROUPS}
    await schedule.admit()
    await schedule.finish(list(schedule.running))
    schedule.update()
    assert schedule.lags[-BATCH_GROUPS:] == [0] * BATCH_GROUPS


async def test_at_ratio_0_every_trained_token_is_of_the_version_being_trained(schedule, redis_client, keys):
    """Also when a group fails on the way and its place is filled again."""
    await schedule.agents.configure(async_generation_ratio=0.0, batch_groups=BATCH_GROUPS)
    consumer = TrajectoryConsumer(redis_client, keys, schedule.training)
    for _ in range(4):
        await schedule.admit()
        assert len(schedule.running) == BATCH_GROUPS
        lost, _ = schedule.running.pop()
        await schedule.agents.discard([lost.group_id], DiscardReason.ENVIRONMENT_GONE, requeue=False)
        await schedule.admit()
        await schedule.finish(list(schedule.running))
        batch = schedule.reader.next_batch(schedule.version, progress=lambda *_: None, is_stopped=lambda: False).batch
        for trajectory in consumer.fetch([episode.entry_id for group in batch for episode in group.trainable]):
            is_sampled = trajectory.loss_mask == 1
            assert (trajectory.token_versions[is_sampled] == schedule.version).all()
        schedule.version += 1
        schedule.training.publish(schedule.version, [group.group_id for group in batch])
