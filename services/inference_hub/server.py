"""Serves the hub: a listening socket, Redis, the hub's parts, and uvicorn on uvloop."""

import asyncio
import logging
import re
import resource
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final, cast

import redis.asyncio
import uvicorn
import uvloop

from services.inference_hub.application import Application
from services.inference_hub.caller_connection import CallerConnection
from services.inference_hub.hub import Hub, open_hub
from shared.configuration import Configuration, RedisSection
from shared.errors import ConfigurationError
from shared.redis_address import PROTOCOL, connection_url
from shared.redis_checks import require_usable_async
from shared.redis_connections import keep_cancellations

BACKLOG: Final = 4_096
STOP_TIMEOUT_S: Final = 5
"""Calls in flight when the hub is told to stop have this long; their callers try again at the next hub."""
REDIS_TIMEOUT_S: Final = 5.0
URL: Final = re.compile(r"\b[a-z][a-z0-9+.-]*://[^\s,;'\"]+", re.IGNORECASE)


class AddresslessFormatter(logging.Formatter):
    """Lines without URLs: one may hold a password or a token, and engines have ids."""

    def format(self, record: logging.LogRecord) -> str:
        return URL.sub("[address]", super().format(record))


class _Server(uvicorn.Server):
    """uvicorn that stops on a signal and then returns, so that what it served can be closed."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        yield


def run(configuration: Configuration) -> None:
    """Serves until a signal. Raises: ConfigurationError if the port is taken or Redis cannot be used."""
    handler = logging.StreamHandler()
    handler.setFormatter(AddresslessFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    _raise_open_files()
    uvloop.run(_serve(configuration))


def server_settings(hub: Hub, *, stop_timeout_s: int) -> uvicorn.Config:
    """uvicorn's settings to serve `hub`, with generate calls on a way of their own."""
    return uvicorn.Config(
        Application(hub),
        http=cast(type[asyncio.Protocol], partial(CallerConnection, hub.generate)),
        lifespan="off",
        access_log=False,
        log_config=None,
        proxy_headers=False,
        timeout_graceful_shutdown=stop_timeout_s,
    )


def redis_client(section: RedisSection) -> redis.asyncio.Redis:
    """Raises at once while Redis is away: whoever asked the hub for something is told."""
    client = redis.asyncio.Redis.from_url(
        connection_url(section.url), protocol=PROTOCOL, socket_connect_timeout=REDIS_TIMEOUT_S, socket_timeout=REDIS_TIMEOUT_S
    )
    keep_cancellations(client.connection_pool)
    return client


async def _serve(configuration: Configuration) -> None:
    listener = _listen(configuration)
    async with redis_client(configuration.redis) as store:
        await require_usable_async(store, configuration.redis)
        async with open_hub(configuration, store) as hub:
            logging.getLogger(__name__).info("serving on port %d", listener.getsockname()[1])
            await _Server(server_settings(hub, stop_timeout_s=STOP_TIMEOUT_S)).serve(sockets=[listener])


def _raise_open_files() -> None:
    """Each open call is two connections, and the usual limit is meant for programs with a few files."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _listen(configuration: Configuration) -> socket.socket:
    section = configuration.inference_hub
    try:
        return socket.create_server((section.host, section.port), backlog=BACKLOG, reuse_port=False)
    except OSError as error:
        raise ConfigurationError(
            f"inference_hub.port must be free on {section.host}, got {section.port}: {error.strerror}; stop what uses it, or set "
            "inference_hub.port"
        ) from error
