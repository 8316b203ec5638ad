"""Finds engines by name: one name stands for any number of them, as a Compose service or a headless Kubernetes service does.

Every address the name resolves to is registered, so engines are scaled by whoever runs them and register nothing themselves.
"""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import Final
from urllib.parse import SplitResult, urlsplit

from redis.exceptions import RedisError

from services.inference_hub.engines import Engine, engine_id_of, normal_url
from shared.errors import ConfigurationError

RESOLVE_TIMEOUT_S: Final = 5.0
NO_SUCH_NAME: Final = frozenset({socket.EAI_NONAME, socket.EAI_NODATA})
"""The answer that the name stands for no engine now; other errors are the name server's."""

logger = logging.getLogger(__name__)


class ResolutionError(Exception):
    """The name server did not answer."""


def service_address(url: str) -> SplitResult:
    """Raises: ConfigurationError if `url` is not http://name:port."""
    parts = urlsplit(url)
    try:
        is_complete = parts.scheme in ("http", "https") and bool((parts.hostname or "").encode("idna")) and parts.port is not None
    except ValueError:
        is_complete = False
    if not is_complete:
        raise ConfigurationError(f"engines.discovery must hold URLs with name and port, such as http://engine:30000, got {url!r}")
    return parts


def engine_url(service: SplitResult, address: str) -> str:
    """The engine at one of a service's IP addresses."""
    host = f"[{address}]" if ":" in address else address
    return f"{service.scheme}://{host}:{service.port}"


def vanished(engines: Iterable[Engine], found_urls: Collection[str]) -> list[Engine]:
    """Engines to forget: found by name before, no longer there, and dead. One that still answers may only be missing in the name's
    records, as a Kubernetes pod is while it is not ready."""
    return [
        engine
        for engine in engines
        if engine.is_discovered and engine.url not in found_urls and not engine.is_verified and not engine.is_updating
    ]


async def resolve(service: SplitResult) -> list[str]:
    """The URLs of the engines that `service` stands for now. Raises: ResolutionError."""
    try:
        async with asyncio.timeout(RESOLVE_TIMEOUT_S):
            found = await asyncio.get_running_loop().getaddrinfo(service.hostname, service.port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        if error.errno in NO_SUCH_NAME:
            return []
        raise ResolutionError(str(error)) from error
    except (OSError, TimeoutError) as error:
        raise ResolutionError(str(error) or f"no answer within {RESOLVE_TIMEOUT_S:g} s") from error
    return sorted({engine_url(service, str(socket_address[0])) for *_, socket_address in found})


class Discovery:
    """Keeps the registry equal to what the names of `services` resolve to."""

    def __init__(
        self,
        services: Iterable[str],
        *,
        interval_s: float,
        engines: Callable[[], Iterable[Engine]],
        add: Callable[[str], Awaitable[None]],
        remove: Callable[[Engine], Awaitable[None]],
    ) -> None:
        """Args: engines: those that are registered. add, remove: called with what is new, and what vanished.
        Raises: ConfigurationError."""
        self._services = [service_address(url) for url in services]
        self._interval_s = interval_s
        self._engines = engines
        self._add = add
        self._remove = remove
        self._problems: list[str] = []

    async def watch(self) -> None:
        """Looks at each interval, until cancelled. While the name server or Redis is away, the engines that are known stay."""
        while self._services:
            try:
                problems = await self.look()
            except RedisError as error:
                problems = [str(error)]
            if problems and problems != self._problems:
                logger.warning("engines.discovery: %s; the engines that are known stay", "; ".join(problems))
            self._problems = problems
            await asyncio.sleep(self._interval_s)

    async def look(self) -> list[str]:
        """Resolves every name once; returns why some could not be resolved. Raises: RedisError."""
        found: set[str] = set()
        problems: list[str] = []
        for service in self._services:
            try:
                found.update(await resolve(service))
            except ResolutionError as error:
                problems.append(f"{service.hostname}: {error}")
        for url in sorted(found - {engine.url for engine in self._engines()}):
            logger.info("engine=%s found by name", engine_id_of(normal_url(url)))
            await self._add(url)
        if not problems:
            for engine in vanished(list(self._engines()), found):
                logger.info("engine=%s is no longer in its name", engine.id)
                await self._remove(engine)
        return problems
