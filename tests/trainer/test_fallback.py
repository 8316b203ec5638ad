"""Falling back to synchronous, as a decision and as what the ledger admits."""

import math

import pytest
import redis.asyncio

from shared.ledger import AdmissionLedger, TrainingLedger
from trainer.fallback import synchronous_until


@pytest.mark.parametrize(
    ("until", "kl", "threshold", "expected"),
    [
        (0, 0.01, 0.02, 0),
        (0, 0.02, 0.02, 0),
        (0, 0.03, 0.02, 14),
        (12, 0.03, 0.02, 14),
        (12, 0.01, 0.02, 12),
        (0, 9.0, None, 0),
        (0, math.nan, 0.02, 0),
    ],
)
def test_a_kl_over_the_threshold_asks_for_so_many_synchronous_updates(until, kl, threshold, expected):
    assert synchronous_until(until, version=10, kl_behaviour=kl, threshold=threshold, num_updates=4) == expected


async def test_fallen_back_the_ledger_admits_as_if_synchronous_and_then_returns(redis_url, redis_client, keys):
    training = TrainingLedger(redis_client, keys)
    training.create_consumer_group()
    async with redis.asyncio.Redis.from_url(redis_url) as client:
        agents = AdmissionLedger(client, keys)
        await agents.configure(async_generation_ratio=1.0, batch_groups=2)
        training.make_synchronous(2)
        in_flight = []
        for version in range(3):
            num_before = training.books().started
            while await agents.admit(
                group_id=f"g{training.books().started}", environment="test", group_size=2, owner="agents", lease_ms=60_000
            ):
                pass
            in_flight.append((training.books().ratio_in_force, training.books().started - num_before))
            training.publish(version + 1, [])
            training.discard([record.group_id for record in training.live_groups().running], "stale", requeue=False)
    assert [ratio for ratio, _ in in_flight] == [0.0, 0.0, 1.0]
    assert [count for _, count in in_flight] == [2, 4, 8]
