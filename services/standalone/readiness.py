"""When a process that was started can be used: one probe for each kind, polled under a deadline."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

import httpx
from redis.asyncio import Redis
from redis.exceptions import RedisError

from shared import redis_address
from shared.redis_connections import keep_cancellations

POLL_S: Final = 0.2
PROBE_TIMEOUT_S: Final = 5.0

Probe = Callable[[], Awaitable[bool]]
"""Whether the process can be used now. It raises nothing on a process that is not there yet."""


async def wait_until(probe: Probe, *, timeout_s: float) -> bool:
    """Polls until `probe` says yes; False if that took longer than `timeout_s`."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not await probe():
        if asyncio.get_running_loop().time() > deadline:
            return False
        await asyncio.sleep(POLL_S)
    return True


def answers(url: str) -> Probe:
    """A GET of `url` gives 200."""

    async def probe() -> bool:
        try:
            async with httpx.AsyncClient(timeout=PROBE_TIMEOUT_S, trust_env=False) as client:
                return (await client.get(url)).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    return probe


def redis_answers(url: str) -> Probe:
    """The Redis at `url` has loaded its data and answers."""

    async def probe() -> bool:
        try:
            async with Redis.from_url(
                redis_address.connection_url(url), socket_timeout=PROBE_TIMEOUT_S, socket_connect_timeout=PROBE_TIMEOUT_S
            ) as client:
                keep_cancellations(client.connection_pool)
                return bool(await client.ping())
        except RedisError:
            return False

    return probe
