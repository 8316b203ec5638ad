"""Idle connections to a Redis that was restarted: closed by it, and no reason to fail a command."""

import asyncio

import pytest

from services.env_agents import application
from services.inference_hub import server
from services.standalone.ports import free_ports
from shared.configuration import RedisSection
from trainer.redis_connection import impatient_client

NUM_CONNECTIONS = 5


@pytest.fixture
def section(serve_redis) -> RedisSection:
    """Over TCP, where redis-py behaves otherwise than over a socket of the file system."""
    [port] = free_ports(1)
    serve_redis("--port", str(port), "--appendonly", "yes")
    return RedisSection(f"redis://127.0.0.1:{port}/0")


@pytest.mark.parametrize("open_client", [application.redis_client, server.redis_client], ids=["agents", "hub"])
async def test_connections_that_redis_closed_are_made_anew(section, open_client):
    async with open_client(section) as client:
        idle = await asyncio.gather(*(client.client_id() for _ in range(NUM_CONNECTIONS)))
        assert len(set(idle)) == NUM_CONNECTIONS
        with impatient_client(section.url) as other:
            other.client_kill_filter(_type="normal", skipme=True)
        for _ in range(NUM_CONNECTIONS):
            await asyncio.sleep(0)  # The loop reads that they were closed.
        again = await asyncio.gather(*(client.client_id() for _ in range(NUM_CONNECTIONS)))
    assert not set(idle) & set(again)


def test_trainers_connection_that_redis_closed_is_made_anew(section):
    with impatient_client(section.url) as client, impatient_client(section.url) as other:
        client.ping()
        other.client_kill_filter(_type="normal", skipme=True)
        assert client.ping()
