import asyncio

import pytest
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from shared.redis_connections import keep_cancellations

MOST_STEPS = 60
"""Of the event loop; one command takes about ten."""


@pytest.fixture
async def client(redis_url):
    async with redis.asyncio.Redis.from_url(redis_url, socket_timeout=60.0, retry=Retry(NoBackoff(), 0)) as client:
        keep_cancellations(client.connection_pool)
        yield client


async def test_a_task_can_be_cancelled_at_every_step_of_a_command(client):
    async def ask():
        while True:
            await client.ping()

    for num_steps in range(MOST_STEPS):
        asking = asyncio.create_task(ask())
        for _ in range(num_steps):
            await asyncio.sleep(0)
        asking.cancel()
        done, _ = await asyncio.wait([asking], timeout=5)
        assert done, f"cancelled after {num_steps} steps, it goes on"
        assert asking.cancelled()
        assert await client.echo(num_steps) == str(num_steps).encode(), "nobody reads the answer to another's command"


async def test_a_caller_that_cleans_up_after_its_cancellation_still_reaches_redis(client):
    async def clean_up():
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.append(await client.echo("cleaned"))

    cleaned = []
    task = asyncio.create_task(clean_up())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert cleaned == [b"cleaned"]
