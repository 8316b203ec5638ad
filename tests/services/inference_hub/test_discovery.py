import asyncio
import socket

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from services.inference_hub import discovery
from services.inference_hub.discovery import ResolutionError, engine_url, resolve, service_address, vanished
from services.inference_hub.engine_client import EngineClient
from services.inference_hub.engines import Engine
from shared.errors import ConfigurationError


def engine(url: str, **known) -> Engine:
    return Engine(url, url, EngineClient(url), **{"is_discovered": True, **known})


@pytest.mark.parametrize(
    "url", ["engine:30000", "http://engine", "ftp://engine:1", "http://:30000", "http://engine:port", "http://a..b:30000", ""]
)
def test_name_without_port_or_scheme_is_refused_with_the_rule(url):
    with pytest.raises(ConfigurationError, match=r"engines\.discovery must hold URLs with name and port"):
        service_address(url)


def test_addresses_become_urls_of_the_services_port():
    service = service_address("http://engine:30000")
    assert engine_url(service, "172.18.0.5") == "http://172.18.0.5:30000"
    assert engine_url(service, "fd00::5") == "http://[fd00::5]:30000"


@pytest.mark.parametrize(
    ("known", "is_vanished"),
    [
        ({}, True),
        ({"is_verified": True}, False),
        ({"is_updating": True}, False),
        ({"is_discovered": False}, False),
    ],
)
async def test_only_a_dead_engine_that_was_found_by_name_vanishes_with_it(known, is_vanished):
    gone, there = engine("http://a:1", **known), engine("http://b:1")
    assert vanished([gone, there], {"http://b:1"}) == ([gone] if is_vanished else [])


async def test_names_resolve_to_the_addresses_behind_them():
    assert "http://127.0.0.1:80" in await resolve(service_address("http://localhost:80"))


@pytest.mark.parametrize("code", [socket.EAI_NONAME, socket.EAI_NODATA])
async def test_a_name_that_stands_for_nothing_is_no_engine(monkeypatch, code):
    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", failing(code))
    assert await resolve(service_address("http://engine:1")) == []


async def test_a_name_server_that_fails_is_no_answer(monkeypatch):
    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", failing(socket.EAI_AGAIN))
    with pytest.raises(ResolutionError):
        await resolve(service_address("http://engine:1"))


def states(served) -> dict[str, str]:
    registry = served.hub.registry
    return {engine.url: str(engine.state(registry.in_force)) for engine in registry.by_id.values()}


def failing(code: int):
    async def getaddrinfo(*_, **__):
        raise socket.gaierror(code, "as the test asks")

    return getaddrinfo


async def test_engines_come_and_go_with_their_name(start_engine, serve_hub, monkeypatch):
    fake = await start_engine()
    found = [fake.url]

    async def behind_the_name(_):
        return list(found)

    monkeypatch.setattr(discovery, "resolve", behind_the_name)
    async with serve_hub(discovery=("http://engine:30000",)) as hub:
        await hub.wait_until(lambda: states(hub) == {fake.url: "ready"}, description="the engine is found")
        found.clear()
        await start_engine.kill(fake)
        await hub.wait_until(lambda: states(hub) == {}, description="the engine is forgotten")
    async with serve_hub() as restarted:
        assert states(restarted) == {}


async def test_known_engines_stay_while_the_name_server_is_away(start_engine, serve_hub, monkeypatch, caplog):
    fake = await start_engine()
    looks = 0

    async def first_found_then_away(_):
        nonlocal looks
        looks += 1
        if looks > 1:
            raise ResolutionError("name server away")
        return [fake.url]

    monkeypatch.setattr(discovery, "resolve", first_found_then_away)
    async with serve_hub(discovery=("http://engine:30000",)) as hub:
        await hub.wait_until(lambda: looks > 3 and states(hub) == {fake.url: "ready"}, description="the engine is known")
        await start_engine.kill(fake)
        await hub.wait_until(lambda: states(hub) == {fake.url: "suspect"}, description="the dead engine is kept")
    assert caplog.text.count("name server away") == 1


async def test_an_engine_removed_while_redis_is_away_is_forgotten_when_it_is_back(start_engine, serve_hub, monkeypatch):
    fake = await start_engine()
    async with serve_hub(fake.url) as hub:
        await hub.wait_until(lambda: states(hub) == {fake.url: "ready"}, description="the engine is ready")
        failures = iter([RedisConnectionError("Redis is away")])
        hdel = hub.hub.registry._redis.hdel

        async def once_away(*arguments):
            for failure in failures:
                raise failure
            return await hdel(*arguments)

        monkeypatch.setattr(hub.hub.registry._redis, "hdel", once_away)
        monkeypatch.setattr("services.inference_hub.hub.REDIS_RETRY_S", 0)
        await hub.hub.remove(hub.hub.registry.find(fake.url).id, is_forced=False)
        await hub.wait_until(lambda: states(hub) == {}, description="the engine is forgotten")
