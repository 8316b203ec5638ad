import pytest
import redis
import redis.asyncio

from shared.keys import Keys
from shared.ledger import AdmissionLedger, TrainingLedger
from shared.stream import TrajectoryConsumer
from tests.shared.episodes import finished_episode


async def write_groups(redis_url: str, keys: Keys, group_ids: list[str]) -> None:
    async with redis.asyncio.Redis.from_url(redis_url) as client:
        ledger = AdmissionLedger(client, keys)
        await ledger.configure(async_generation_ratio=1.0, batch_groups=8)
        for group_id in group_ids:
            group = await ledger.admit(group_id=group_id, environment="calculator", group_size=2, owner="agent", lease_ms=60_000)
            assert group is not None
            for sample_index in range(2):
                await ledger.finish(finished_episode(group, sample_index))


def consumer_of(client: redis.Redis, keys: Keys) -> tuple[TrajectoryConsumer, TrainingLedger]:
    ledger = TrainingLedger(client, keys)
    ledger.create_consumer_group()
    return TrajectoryConsumer(client, keys, ledger), ledger


async def test_a_restarted_trainer_reads_again_what_was_not_acknowledged(
    redis_url: str, redis_client: redis.Redis, keys: Keys
) -> None:
    await write_groups(redis_url, keys, ["a", "b"])
    consumer, ledger = consumer_of(redis_client, keys)
    first = [delivery.trajectory.trajectory_id for delivery in consumer.read(block_ms=1)]
    ledger.publish(1, ["a"])
    ledger.acknowledge(1)

    successor, _ = consumer_of(redis_client, keys)
    assert first == ["a-0", "a-1", "b-0", "b-1"]
    assert [delivery.trajectory.trajectory_id for delivery in successor.redelivered()] == ["b-0", "b-1"]
    assert successor.read(block_ms=1) == []


async def test_redelivery_pages_through_more_than_one_read(
    redis_url: str, redis_client: redis.Redis, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrajectoryConsumer, "PAGE", 5)
    group_ids = [f"g{i:03d}" for i in range(16)]
    await write_groups(redis_url, keys, group_ids)
    consumer, _ = consumer_of(redis_client, keys)
    while consumer.read(block_ms=1):
        pass
    assert [delivery.trajectory.group_id for delivery in consumer.redelivered()] == [g for g in group_ids for _ in range(2)]


async def test_any_rank_fetches_its_own_share_in_order(redis_url: str, redis_client: redis.Redis, keys: Keys) -> None:
    await write_groups(redis_url, keys, ["a"])
    consumer, _ = consumer_of(redis_client, keys)
    entry_ids = [delivery.entry_id for delivery in consumer.read(block_ms=1)]
    assert [t.trajectory_id for t in consumer.fetch(entry_ids[::-1])] == ["a-1", "a-0"]


async def test_an_unreadable_record_is_buried_with_its_reason_and_its_group_discarded(
    redis_url: str, redis_client: redis.Redis, keys: Keys
) -> None:
    await write_groups(redis_url, keys, ["bad", "good"])
    entry_id, fields = redis_client.xrange(keys.trajectories, count=1)[0]
    redis_client.xdel(keys.trajectories, entry_id)
    redis_client.xadd(keys.trajectories, {**fields, b"trajectory": b"\xc1"})
    consumer, ledger = consumer_of(redis_client, keys)
    delivered = [delivery.trajectory.trajectory_id for delivery in consumer.read(block_ms=1)]
    assert {"good-0", "good-1"} <= set(delivered)
    [(_, letter)] = redis_client.xrange(keys.dead_letters)
    assert letter[b"group_id"] == b"bad"
    assert b"not a trajectory record" in letter[b"reason"]
    books = ledger.books()
    assert books.is_balanced
    assert (books.discarded, books.dead_letters) == ({"unreadable": 1}, 1)
    assert [delivery.trajectory.trajectory_id for delivery in consumer.redelivered()] == ["good-0", "good-1"]


async def test_dead_letters_are_bounded_and_counted(
    redis_url: str, redis_client: redis.Redis, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.ledger.MAX_DEAD_LETTERS", 3)
    consumer, ledger = consumer_of(redis_client, keys)
    for number in range(5):
        redis_client.xadd(keys.trajectories, {"trajectory": f"not a record {number}"})
    assert consumer.read(block_ms=1) == []
    assert [fields[b"trajectory"] for _, fields in redis_client.xrange(keys.dead_letters)] == [
        f"not a record {number}".encode() for number in (2, 3, 4)
    ]
    books = ledger.books()
    assert (books.dead_letters, books.stream_entries, dict(books.discarded)) == (5, 0, {})


async def test_entries_discarded_while_pending_are_skipped(redis_url: str, redis_client: redis.Redis, keys: Keys) -> None:
    await write_groups(redis_url, keys, ["a", "b"])
    consumer, _ = consumer_of(redis_client, keys)
    entry_ids = [delivery.entry_id for delivery in consumer.read(block_ms=1)]
    redis_client.xdel(keys.trajectories, *entry_ids[:2])
    assert [delivery.trajectory.group_id for delivery in consumer.redelivered()] == ["b", "b"]
    assert redis_client.xpending(keys.trajectories, "trainer")["pending"] == 2
