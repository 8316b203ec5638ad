"""Kept connections to one engine for generate calls: HTTP/1.1 on asyncio's transports with httptools' parser.

aiohttp's client costs more of a call than everything else that the hub does for it, so only control calls use that one.
"""

import asyncio
import errno
import logging
import resource
import ssl
import sys
from collections.abc import Callable
from itertools import takewhile
from typing import Any, ClassVar, Final, cast
from urllib.parse import urlsplit

import httptools

CONNECT_TIMEOUT_S: Final = 5.0
KEEPALIVE_S: Final = 4.0
"""Below the five seconds after which SGLang closes an idle connection, so that no call is sent into a closing one."""
SPARE_FILES: Final = 128
"""File descriptors for what is no call: the listening socket, Redis, control calls."""
OUT_OF_FILES: Final = (errno.EMFILE, errno.ENFILE)
OUT_OF_FILES_WAIT_S: Final = 0.05

logger = logging.getLogger(__name__)


class ConnectError(Exception):
    """No connection could be made: the engine did not receive the request."""


class StaleConnectionError(Exception):
    """The engine closed a kept connection before it answered anything: it may not have received the request."""


class LostConnectionError(Exception):
    """The connection ended after the request was sent and before the answer was complete."""


class EngineConnection(asyncio.Protocol):
    """One connection, IDLE → BUSY → IDLE … → closed. Its pool gives it one request at a time."""

    num_open: ClassVar[int] = 0
    """In this process. Those that are being made are in `num_connecting`."""
    num_connecting: ClassVar[int] = 0

    def __init__(self, loop: asyncio.AbstractEventLoop, forget: Callable[["EngineConnection"], object]) -> None:
        self._loop = loop
        self._forget = forget
        self._transport: asyncio.Transport
        self._parser = httptools.HttpResponseParser(self)
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None
        self._pieces: list[bytes] = []
        self._is_used = False
        self._has_begun = False
        self._was_cut = False
        self.is_open = False
        self.idle_since = 0.0

    def ask(self, request: bytes) -> asyncio.Future[tuple[int, bytes]]:
        """Sends one request; the future has status and body of the answer, or the connection's error."""
        answer = self._answer = self._loop.create_future()
        self._has_begun = False
        self._transport.write(request)
        return answer

    def close(self) -> None:
        """Cuts it, also in the middle of a request."""
        self._was_cut = True
        self.is_open = False
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.is_open = True
        EngineConnection.num_open += 1

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        EngineConnection.num_open -= 1
        self._forget(self)
        del self._parser  # It refers back to this object, and garbage collection comes late to a hub that is idle.
        if self._answer is not None and not self._answer.done():
            reason = str(error) if error else "cut by the hub" if self._was_cut else "closed by the engine"
            is_stale = self._is_used and not self._has_begun and not self._was_cut
            kind = StaleConnectionError if is_stale else LostConnectionError
            self._answer.set_exception(kind(reason))

    def data_received(self, data: bytes) -> None:
        self._has_begun = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"what it answered is not HTTP: {error}")

    def on_body(self, piece: bytes) -> None:
        self._pieces.append(piece)

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:
            return
        pieces = self._pieces
        body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        self._pieces = []
        self._is_used = True
        if not self._parser.should_keep_alive():
            self.is_open = False
        answer, self._answer = self._answer, None
        if answer is None or answer.done():
            self.close()
        else:
            answer.set_result((status, body))

    def _fail(self, reason: str) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(LostConnectionError(reason))
        self.close()


def max_connections() -> int:
    """To engines, of this process: each belongs to a caller's, and libuv closes callers for whom it has no descriptor left."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else max(1, (soft - SPARE_FILES) // 2)


class EngineConnections:
    """The connections to one engine: a request takes the one used last, or a new one. `close` cuts all."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._head = (
            f"POST {parts.path}/generate HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\nContent-Length: "
        ).encode()
        self._idle: dict[EngineConnection, None] = {}
        self._busy: set[EngineConnection] = set()
        self._lacks_files = False

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    async def generate(self, body: bytes) -> tuple[int, bytes]:
        """Status and body of the engine's answer. Cancelling it closes its connection, which the engine notices.

        Raises: ConnectError, StaleConnectionError, LostConnectionError.
        """
        while (connection := self._take() or await self._connect()) is None:  # noqa: ASYNC110 - nobody would set an event
            await asyncio.sleep(OUT_OF_FILES_WAIT_S)
        self._busy.add(connection)
        try:
            answer = await connection.ask(b"%b%d\r\n\r\n%b" % (self._head, len(body), body))
        except BaseException:
            connection.close()
            raise
        finally:
            self._busy.discard(connection)
        if connection.is_open:
            connection.idle_since = asyncio.get_running_loop().time()
            self._idle[connection] = None
        else:
            connection.close()
        return answer

    def close(self) -> None:
        self.close_idle()
        for connection in list(self._busy):
            connection.close()

    def close_idle(self) -> None:
        for connection in list(self._idle):
            connection.close()
        self._idle.clear()

    def close_old(self) -> None:
        """Those that were idle for too long to be used again; to be called now and then, because an engine may keep them open."""
        oldest_s = asyncio.get_running_loop().time() - KEEPALIVE_S
        for connection in list(takewhile(lambda connection: connection.idle_since < oldest_s, self._idle)):
            del self._idle[connection]
            connection.close()

    def _take(self) -> EngineConnection | None:
        """The idle connection used last. If that one is too old, so are the others, and all are closed."""
        if not self._idle:
            return None
        connection, _ = self._idle.popitem()
        if asyncio.get_running_loop().time() - connection.idle_since <= KEEPALIVE_S:
            return connection
        connection.close()
        self.close_idle()
        return None

    async def _connect(self) -> EngineConnection | None:
        """A new connection; None while the hub has no file descriptor left for one, which is no failure of the engine."""
        loop = asyncio.get_running_loop()
        if EngineConnection.num_open + EngineConnection.num_connecting >= max_connections():
            self._note_shortage()
            return None
        options: dict[str, Any] = {"ssl": self._tls} if self._tls else {}
        EngineConnection.num_connecting += 1
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, connection = await loop.create_connection(
                    lambda: EngineConnection(loop, self._forget), self._host, self._port, **options
                )
        except TimeoutError as error:
            raise ConnectError(f"no connection within {CONNECT_TIMEOUT_S:g} s") from error
        except OSError as error:
            if error.errno not in OUT_OF_FILES:
                raise ConnectError(str(error)) from error
            self._note_shortage()
            return None
        finally:
            EngineConnection.num_connecting -= 1
        self._lacks_files = False
        return connection

    def _note_shortage(self) -> None:
        if not self._lacks_files:
            logger.warning("the hub has no file descriptor left for a connection to an engine: calls wait; raise ulimit -n")
        self._lacks_files = True

    def _forget(self, connection: EngineConnection) -> None:
        self._idle.pop(connection, None)
