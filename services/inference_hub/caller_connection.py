"""A caller's connection to the hub: generate calls are parsed and answered here, every other request by uvicorn.

uvicorn makes one of these for each connection it accepts. A scope, a task and queues for every request are what an ASGI
application needs and what a generate call does not. The first request that is something else makes the connection an ordinary
one of uvicorn's, for the rest of its life.
"""

import asyncio
import logging
from http import HTTPStatus
from typing import Any, Final, Protocol, cast

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from services.inference_hub.resume import Reply, body_too_large, error_reply

GENERATE_LINE: Final = b"POST /generate HTTP/1.1\r\n"
MAX_HEAD_BYTES: Final = 64 * 1024
IDLE_S: Final = 75.0
"""A connection on which no request ends for one to two times this long is closed, unless one is being answered."""
OK_HEAD: Final = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: "

logger = logging.getLogger(__name__)

Headers = dict[bytes, bytes]
"""By lower-case name; of a repeated one, the last."""


class Answers(Protocol):
    """What answers generate calls."""

    max_body_bytes: int

    async def answer(self, body: bytes, headers: Headers) -> Reply:
        """Cancelled when the caller leaves."""
        ...


class CallerConnection(asyncio.Protocol):
    """READING → ANSWERING → READING … → handed over to uvicorn, or closed. One request at a time."""

    def __init__(
        self,
        generate: Answers,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,  # Named by uvicorn.
    ) -> None:
        self._uvicorn = (config, server_state, app_state)
        self._connections: set[Any] = server_state.connections
        self._tasks: set[asyncio.Task[None]] = server_state.tasks
        self._loop = _loop or asyncio.get_running_loop()
        self._generate = generate
        self._transport: asyncio.Transport
        self._parser = httptools.HttpRequestParser(self)
        self._task: asyncio.Task[None] | None = None
        self._is_last = False
        self._num_answered = 0
        self._unread = b""
        self._read_next()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._connections.add(self)
        self._idle_check = self._loop.call_later(IDLE_S, self._close_if_idle, 0)

    def connection_lost(self, error: Exception | None) -> None:
        self._leave()
        if self._task is not None:
            self._task.cancel()

    def shutdown(self) -> None:
        """The server stops: the call that is being answered is the last on this connection."""
        self._is_last = True
        if self._task is None:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        if self._task is not None:
            # Whoever sends on before it has its answer has to send that again: HTTP lets a server close in between.
            self._is_last = True
            return
        if not self._num_read_bytes:
            data = self._unread + data
            if not data.startswith(GENERATE_LINE[: len(data)]):
                self._hand_over(data)
                return
            if len(data) < len(GENERATE_LINE):
                self._unread = data
                return
        self._num_read_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._refuse(error_reply(400, f"a request must be one of HTTP/1.1, got something else: {error}"))
            return
        if not self._has_head and self._num_read_bytes > MAX_HEAD_BYTES:
            self._refuse(error_reply(431, f"the headers of a request must be at most {MAX_HEAD_BYTES} bytes, got more; send fewer"))

    def on_message_begin(self) -> None:
        self._is_last = self._is_last or self._task is not None

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._task is None:
            self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        self._has_head = True
        if self._task is None and self._headers.get(b"expect", b"").lower() == b"100-continue":
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, piece: bytes) -> None:
        if self._task is not None:
            return
        self._num_body_bytes += len(piece)
        if self._num_body_bytes > self._generate.max_body_bytes:
            self._refuse(body_too_large(self._generate.max_body_bytes))
        else:
            self._pieces.append(piece)

    def on_message_complete(self) -> None:
        if self._task is not None or self._transport.is_closing():
            return
        if not self._parser.should_keep_alive():
            self._is_last = True
        body = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._task = self._loop.create_task(self._answer(body, self._headers))
        self._tasks.add(self._task)
        self._task.add_done_callback(self._tasks.discard)

    async def _answer(self, body: bytes, headers: Headers) -> None:
        try:
            reply = await self._generate.answer(body, headers)
        except asyncio.CancelledError:
            self._transport.close()
            raise
        except Exception:  # The boundary of a call: whatever goes wrong in one is one answer.
            logger.exception("a generate call failed")
            reply = error_reply(500, "a generate call must not fail in the hub itself, and this one did; see the hub's log")
        self._task = None
        self._write(reply)

    def _write(self, reply: Reply) -> None:
        if reply.status == 200 and not self._is_last:
            self._transport.write(b"%b%d\r\n\r\n%b" % (OK_HEAD, len(reply.body), reply.body))
        else:
            self._transport.write(_encoded(reply, is_last=self._is_last))
            if self._is_last:
                self._transport.close()
        self._num_answered += 1
        self._read_next()

    def _read_next(self) -> None:
        self._headers: Headers = {}
        self._pieces: list[bytes] = []
        self._num_read_bytes = 0
        self._num_body_bytes = 0
        self._has_head = False
        self._unread = b""

    def _refuse(self, reply: Reply) -> None:
        """Answers a request that is not read to its end, so that nothing can follow it."""
        if not self._transport.is_closing():
            self._transport.write(_encoded(reply, is_last=True))
            self._transport.close()

    def _hand_over(self, data: bytes) -> None:
        self._leave()
        protocol = HttpToolsProtocol(*self._uvicorn)
        self._transport.set_protocol(protocol)
        protocol.connection_made(self._transport)
        protocol.data_received(data)

    def _leave(self) -> None:
        self._idle_check.cancel()
        self._connections.discard(self)
        del self._parser  # It refers back to this object, and garbage collection comes late to a hub that is idle.

    def _close_if_idle(self, num_answered: int) -> None:
        if self._task is None and self._num_answered == num_answered:
            self._transport.close()
        else:
            self._idle_check = self._loop.call_later(IDLE_S, self._close_if_idle, self._num_answered)


def _encoded(reply: Reply, *, is_last: bool) -> bytes:
    lines = [f"HTTP/1.1 {reply.status} {HTTPStatus(reply.status).phrase}", "content-type: application/json"]
    lines += [f"{name}: {value}" for name, value in reply.headers]
    lines += [f"content-length: {len(reply.body)}", *(["connection: close"] if is_last else []), "", ""]
    return "\r\n".join(lines).encode("latin-1") + reply.body
