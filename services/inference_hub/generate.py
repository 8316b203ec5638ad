"""`POST /generate`, the hot path: hold → choose → relay → resume.

A request goes to the engine as the bytes that came, with the hub's fields after them, and an answer that needs no joining comes
back as the bytes the engine sent.
"""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping
from itertools import count
from typing import Any, Final

from services.inference_hub.call_deadlines import CallDeadlines
from services.inference_hub.caller_connection import Headers
from services.inference_hub.engine_client import EngineUnreachableError
from services.inference_hub.engines import Engine, EngineRegistry
from services.inference_hub.gate import Gate
from services.inference_hub.metrics import Metrics
from services.inference_hub.resume import (
    MAX_BODY_BYTES,
    Call,
    RefusedError,
    Reply,
    body_too_large,
    error_reply,
    parse_request,
)
from services.inference_hub.routing import Sessions, choose
from shared.errors import EngineError

Scope = Mapping[str, Any]
Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

SESSION_HEADER: Final = b"x-session-id"
MAX_CALLS: Final = 65_536
"""Calls in the hub at once, held ones included."""


class CallerLeftError(Exception):
    """The caller closed its connection before it had sent its request."""


class GenerateEndpoint:
    """Answers one generate call for each ASGI request. `tasks` owns the aborts of requests whose callers left."""

    def __init__(
        self,
        registry: EngineRegistry,
        gate: Gate,
        metrics: Metrics,
        tasks: asyncio.TaskGroup,
        *,
        timeout_s: float,
        max_attempts: int,
    ) -> None:
        self._registry = registry
        self._gate = gate
        self._metrics = metrics
        self._tasks = tasks
        self._deadlines = CallDeadlines(timeout_s)
        self._rids = request_ids()
        self._max_attempts = max_attempts
        self._sessions = Sessions()
        self.num_calls = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The same as an ASGI application, for a connection that also carries other requests."""
        try:
            body = await _read_body(receive)
        except CallerLeftError:
            return
        if body is None:
            await _send_reply(send, body_too_large())
            return
        async with asyncio.TaskGroup() as tasks:
            answering = tasks.create_task(self.answer(body, dict(scope["headers"])))
            leaving = tasks.create_task(_disconnected(receive))
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
            answering.cancel()
            leaving.cancel()
        if not answering.cancelled():
            await _send_reply(send, answering.result())

    async def answer(self, body: bytes, headers: Headers) -> Reply:
        """The answer to one call. It is cancelled when the caller leaves, and then the engine is told to stop."""
        task = asyncio.current_task()
        assert task is not None
        arrived = time.perf_counter()
        self.num_calls += 1
        self._deadlines.begin(task, arrived)
        call = None
        try:
            call = self._accept(body)
            reply = await self._settle(call, headers.get(SESSION_HEADER, b"").decode("latin-1") or None)
        except RefusedError as error:
            reply = error_reply(error.status, str(error))
        except asyncio.CancelledError:
            if not self._deadlines.end(task):
                self._metrics.abandoned_calls.inc()
                raise
            assert call is not None
            reply = self._overdue(call)
        finally:
            self._deadlines.end(task)
            self.num_calls -= 1
        self._metrics.calls.labels(reply.status).inc()
        self._metrics.call_seconds.observe(time.perf_counter() - arrived)
        self._metrics.output_tokens.inc(reply.num_tokens)
        return reply

    async def watch(self) -> None:
        """Holds calls to their deadline, until it is cancelled."""
        await self._deadlines.watch()

    def _accept(self, body: bytes) -> Call:
        if self.num_calls > MAX_CALLS:
            raise RefusedError(429, f"the hub answers at most {MAX_CALLS} generate calls at once; send this one again later")
        return Call(parse_request(body), max_attempts=self._max_attempts)

    async def _settle(self, call: Call, session_id: str | None) -> Reply:
        """Attempts until one settles the call."""
        reply = None
        while reply is None:
            if call.delay_s:
                await asyncio.sleep(call.delay_s)
            if not self._gate.is_open:
                await self._held()
            reply = await self._attempt(call, self._choose(call, session_id))
        return reply

    def _overdue(self, call: Call) -> Reply:
        held = f"calls are held because {' and '.join(self._gate.reasons)}; " if not self._gate.is_open else ""
        return error_reply(
            503,
            f"a generate call must be answered within {self._deadlines.timeout_s:g} s (inference_hub.generate_timeout_s), and was "
            f"not after {call.num_attempts} attempts: {held}{call.history}; GET /engines says what state each engine is in",
        )

    async def _held(self) -> None:
        since = time.perf_counter()
        try:
            await self._gate.passed()
        finally:
            self._metrics.hold_seconds.observe(time.perf_counter() - since)

    def _choose(self, call: Call, session_id: str | None) -> Engine:
        """The engine for the next attempt; one that this call failed on only if there is no other."""
        engines = self._registry.routable
        if call.failed_engine_ids:
            engines = tuple(engine for engine in engines if engine.id not in call.failed_engine_ids) or engines
        preferred_id = self._sessions.engine_id(session_id) if session_id else None
        engine = choose(engines, preferred_id=preferred_id, cost_tokens=call.cost_tokens)
        if session_id:
            self._sessions.remember(session_id, engine.id)
        return engine

    async def _attempt(self, call: Call, engine: Engine) -> Reply | None:
        rid = next(self._rids)
        in_force = self._registry.in_force
        body = call.begin(rid=rid, epoch=in_force.epoch, version=in_force.version)
        cost_tokens = call.cost_tokens
        engine.begin_call(cost_tokens)
        try:
            status, answer = await engine.client.generate(body)
        except asyncio.CancelledError:
            self._tasks.create_task(_abort(engine, rid))
            raise
        except EngineUnreachableError as error:
            self._metrics.attempt_failures.labels("unreachable").inc()
            self._registry.suspect(engine, str(error))
            call.unreached(engine.id)
            return None
        except EngineError as error:
            self._metrics.attempt_failures.labels("cut").inc()
            self._registry.suspect(engine, str(error))
            return call.failed(engine.id, str(error))
        finally:
            engine.end_call(cost_tokens)
        engine.has_answered = True
        kept_before = call.num_received_tokens
        reply = call.answered(engine.id, status, answer, has_early_labels=engine.has_early_labels)
        if reply is None:
            self._metrics.attempt_failures.labels("aborted" if status == 200 else "server_error").inc()
            self._metrics.resumed_tokens.inc(call.num_received_tokens - kept_before)
        return reply


async def _abort(engine: Engine, rid: str) -> None:
    try:
        await engine.client.abort(rid)
    except EngineError:
        # The engine notices the closed connection by itself, only later; a dead one has nothing to abort.
        return


def request_ids() -> Iterator[str]:
    """Ids of one length, because SGLang aborts by prefix, that no other hub uses."""
    prefix = uuid.uuid4().hex[:20]
    return (f"{prefix}{number:012x}" for number in count())


async def _read_body(receive: Receive) -> bytes | None:
    """None if it is over the limit. Raises: CallerLeftError."""
    chunks = []
    num_bytes = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise CallerLeftError
        chunks.append(message.get("body", b""))
        num_bytes += len(chunks[-1])
        if num_bytes > MAX_BODY_BYTES:
            return None
        if not message.get("more_body", False):
            return b"".join(chunks)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_reply(send: Send, reply: Reply) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(reply.body))]
    headers += [(name.encode(), value.encode()) for name, value in reply.headers]
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "http.response.body", "body": reply.body})
