import asyncio

import aiohttp
import pytest
from aiohttp import web
from aiohttp.abc import AbstractResolver
from aiohttp.test_utils import TestServer

from services.env_agents.openenv import OpenEnvServer, UnreachableEnvironmentError
from services.env_agents.remote_hosts import HostNotAllowedError, RedirectError, RemoteHosts, remote_session
from shared.errors import ConfigurationError

LOOPBACK = ("127.0.0.0/8", "::1/128")


class Names(AbstractResolver):
    """A name server for tests: every name stands for `addresses`."""

    def __init__(self, *addresses: str) -> None:
        self._addresses = addresses

    async def resolve(self, host, port=0, family=0):
        return [
            {"hostname": host, "host": address, "port": port, "family": family, "proto": 0, "flags": 0}
            for address in self._addresses
        ]

    async def close(self) -> None:
        return


@pytest.fixture
async def server():
    async def answer(_):
        return web.Response(text="here")

    async def away(request):
        raise web.HTTPFound(request.query["to"])

    app = web.Application()
    app.router.add_get("/", answer)
    app.router.add_get("/away", away)
    async with TestServer(app) as server:
        yield server


def test_a_default_admits_this_machine_alone():
    hosts = RemoteHosts(LOOPBACK)
    for host in ("127.0.0.1", "127.8.8.8", "::1"):
        hosts.require(host)
    for host in ("10.0.0.9", "8.8.8.8", "fd00::1"):
        with pytest.raises(HostNotAllowedError, match=rf"environment_hosts admits \(127.0.0.0/8, ::1/128\), got '{host}'; add"):
            hosts.require(host)


@pytest.mark.parametrize(
    "address",
    [
        "169.254.169.254",
        "169.254.0.1",
        "fe80::1",
        "fe80::1%eth0",
        "fd00:ec2::254",
        "fd20:ce::254",
        "fd00:c1::a9fe:a9fe",
        "100.100.100.200",
        "168.63.129.16",
        "0.0.0.0",
        "::",
        "224.0.0.1",
        "ff02::1",
        "255.255.255.255",
        "::ffff:169.254.169.254",
        "64:ff9b::a9fe:a9fe",
        "2002:a9fe:a9fe::1",
    ],
)
@pytest.mark.parametrize("allowed", [("*",), ("0.0.0.0/0", "::/0")])
async def test_no_allowlist_opens_metadata_servers(address, allowed):
    hosts = RemoteHosts(allowed)
    with pytest.raises(HostNotAllowedError, match="must be at an address of a host"):
        hosts.require(address)
    async with remote_session(hosts, resolver=Names("10.0.0.1", address)) as session:
        with pytest.raises(HostNotAllowedError, match=r"'inno.cent', which leads to "):
            await session.get("http://inno.cent/")


@pytest.mark.parametrize(
    ("allowed", "addresses", "is_admitted"),
    [
        (("127.0.0.0/8",), ("127.0.0.1",), True),
        (("127.0.0.0/8",), ("127.0.0.1", "10.0.0.1"), False),
        (("env.test",), ("127.0.0.1",), True),
        (("*.test",), ("127.0.0.1",), True),
        (("other.test", "10.0.0.0/8"), ("127.0.0.1",), False),
        (("other.test",), ("127.0.0.1",), False),
        ((), ("127.0.0.1",), False),
    ],
)
async def test_a_name_is_admitted_by_itself_or_by_all_its_addresses(server, allowed, addresses, is_admitted):
    async with remote_session(RemoteHosts(allowed), resolver=Names(*addresses)) as session:
        request = session.get(f"http://env.test:{server.port}/")
        if is_admitted:
            async with request as response:
                assert await response.text() == "here"
        else:
            with pytest.raises(HostNotAllowedError, match=r"env_agents\.environment_hosts"):
                await request


@pytest.mark.parametrize("to", ["http://169.254.169.254/latest", "/", "http://10.0.0.1/"])
@pytest.mark.parametrize("method", ["get", "ws_connect"])
async def test_no_redirect_is_followed(server, to, method):
    async with remote_session(RemoteHosts(LOOPBACK)) as session:
        with pytest.raises(RedirectError, match="answered 302, and redirects are not followed; give the last url"):
            await getattr(session, method)(server.make_url("/away").with_query(to=to))


@pytest.mark.parametrize("host", ["2130706433", "127.1", "0x7f.0.0.1", "0177.0.0.1"])
async def test_old_spellings_of_an_address_lead_nowhere(host, server):
    async with remote_session(RemoteHosts(("10.0.0.0/8",)), resolver=Names("127.0.0.1")) as session:
        with pytest.raises((HostNotAllowedError, aiohttp.InvalidURL)):
            await session.get(f"http://{host}:{server.port}/")


def test_an_allowlist_that_cannot_be_meant_is_refused():
    with pytest.raises(ConfigurationError, match=r"env_agents.environment_hosts must hold .* got '10.0.0.1/8'"):
        RemoteHosts(["10.0.0.1/8"])


async def test_a_redirecting_environment_server_is_named_with_the_reason(server, http_session):
    async def away(_):
        raise web.HTTPFound("http://169.254.169.254/latest")

    app = web.Application()
    app.router.add_get("/schema", away)
    async with TestServer(app) as redirecting, asyncio.timeout(20):
        with pytest.raises(UnreachableEnvironmentError, match="redirects are not followed"):
            await OpenEnvServer.find(http_session, str(redirecting.make_url("")), {})
