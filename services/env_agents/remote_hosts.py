"""Where environments and rewards may be: every connection that a spec asks for goes through `remote_session`.

A spec names a host, and whoever registers it may be another than who runs this process. So the host has to be in
`env_agents.environment_hosts`, what its name resolves to is looked at where the connection is made, and redirects are not followed.
"""

import socket
from collections.abc import Iterable
from typing import Final

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import DefaultResolver

from shared.errors import ConfigurationError, EpisodeError
from shared.host_allowlist import HostAllowlist, address_in, why_never

_KEY: Final = "env_agents.environment_hosts"
_CONNECT_TIMEOUT_S: Final = 10.0


class HostNotAllowedError(ConfigurationError):
    """A host that env_agents.environment_hosts does not admit."""


class RedirectError(EpisodeError):
    """A server that sends us elsewhere."""


class RemoteHosts:
    """The decision: by name, or by every address that the name stands for."""

    def __init__(self, allowed: Iterable[str]) -> None:
        """Raises: ConfigurationError."""
        self._allowlist = HostAllowlist(allowed, key=_KEY)

    def require(self, host: str) -> None:
        """Before a host is resolved. Raises: HostNotAllowedError, unless its addresses may still decide."""
        address = address_in(host)
        if address is not None:
            self.require_addresses(host, [host])
        elif not self._allowlist.networks and not self._allowlist.admits_name(host):
            raise self._refusal(host)

    def require_addresses(self, host: str, addresses: Iterable[str]) -> None:
        """Raises: HostNotAllowedError if one of the addresses that `host` stands for is none that we may connect to."""
        is_named = self._allowlist.admits_name(host)
        for written in addresses:
            address = address_in(written)
            if address is None or (because := why_never(address)):
                because = because if address is not None else "not one"
                raise HostNotAllowedError(
                    f"an environment or a reward must be at an address of a host, and {_leading(host, written)} is {because}; give "
                    "the server's own"
                )
            if not is_named and not self._allowlist.admits_address(address):
                raise self._refusal(_leading(host, written))

    def _refusal(self, host: str) -> HostNotAllowedError:
        entries = ", ".join(self._allowlist.entries) or "empty"
        return HostNotAllowedError(
            f"an environment or a reward must be at a host that {_KEY} admits ({entries}), got {host}; add the host or its network "
            "there in the run file"
        )


class _GuardedResolver(AbstractResolver):
    """What it answers is what aiohttp connects to, so a name cannot mean another address by then."""

    def __init__(self, hosts: RemoteHosts, inner: AbstractResolver) -> None:
        self._hosts = hosts
        self._inner = inner

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AddressFamily.AF_INET
    ) -> list[ResolveResult]:
        found = await self._inner.resolve(host, port, family)
        self._hosts.require_addresses(host, [result["host"] for result in found])
        return found

    async def close(self) -> None:
        await self._inner.close()


def remote_session(hosts: RemoteHosts, *, resolver: AbstractResolver | None = None) -> aiohttp.ClientSession:
    """A session that connects only where `hosts` lets it, and follows no redirect; the episodes in flight bound its connections.

    Its requests raise, besides aiohttp's errors: HostNotAllowedError, RedirectError. Args: resolver: None for the system's.
    """

    async def guard(request: aiohttp.ClientRequest, send: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
        # An address needs no resolver, so it is looked at here.
        hosts.require(request.url.host or "")
        response = await send(request)
        if 300 <= response.status < 400 and "Location" in response.headers:
            response.close()
            raise RedirectError(f"{request.url} answered {response.status}, and redirects are not followed; give the last url")
        return response

    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, resolver=_GuardedResolver(hosts, resolver or DefaultResolver())),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S),
        middlewares=(guard,),
    )


def _leading(host: str, address: str) -> str:
    return repr(host) if host == address else f"{host!r}, which leads to {address},"
