"""`POST /generate`, the hot path: hold → choose → relay → resume, as a plain ASGI callable.

An answer that needs no joining is relayed as the bytes the engine sent.
"""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from services.inference_hub.engine_client import EngineUnreachableError
from services.inference_hub.engines import Engine, EngineRegistry
from services.inference_hub.gate import Gate
from services.inference_hub.metrics import Metrics
from services.inference_hub.resume import MAX_BODY_BYTES, Call, RefusedError, Reply, error_reply, parse_request
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
    """The caller closed its connection before it had its answer."""


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
        self._timeout_s = timeout_s
        self._max_attempts = max_attempts
        self._sessions = Sessions()
        self.num_calls = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrived = time.perf_counter()
        self.num_calls += 1
        try:
            reply = await self._reply(scope, receive)
        except CallerLeftError:
            self._metrics.abandoned_calls.inc()
            return
        finally:
            self.num_calls -= 1
        self._metrics.calls.labels(reply.status).inc()
        self._metrics.call_seconds.observe(time.perf_counter() - arrived)
        self._metrics.output_tokens.inc(reply.num_tokens)
        await _send_reply(send, reply)

    async def _reply(self, scope: Scope, receive: Receive) -> Reply:
        try:
            if self.num_calls > MAX_CALLS:
                raise RefusedError(429, f"the hub answers at most {MAX_CALLS} generate calls at once; send this one again later")
            call = Call(parse_request(await _read_body(receive)), max_attempts=self._max_attempts)
        except RefusedError as error:
            return error_reply(error.status, str(error))
        async with asyncio.TaskGroup() as tasks:
            answering = tasks.create_task(self._answer(call, _session_id(scope)))
            leaving = tasks.create_task(_disconnected(receive))
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
            answering.cancel()
            leaving.cancel()
        if answering.cancelled():
            raise CallerLeftError
        return answering.result()

    async def _answer(self, call: Call, session_id: str | None) -> Reply:
        """Attempts until one settles the call, or its deadline passes."""
        try:
            async with asyncio.timeout(self._timeout_s):
                reply = None
                while reply is None:
                    if call.delay_s:
                        await asyncio.sleep(call.delay_s)
                    if not self._gate.is_open:
                        await self._held()
                    reply = await self._attempt(call, self._choose(call, session_id))
                return reply
        except TimeoutError:
            held = f"calls are held because {' and '.join(self._gate.reasons)}; " if not self._gate.is_open else ""
            return error_reply(
                503,
                f"a generate call must be answered within {self._timeout_s:g} s (inference_hub.generate_timeout_s), and was not "
                f"after {call.num_attempts} attempts: {held}{call.history}; GET /engines says what state each engine is in",
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
        rid = uuid.uuid4().hex
        weights = engine.weights
        body = call.begin(rid=rid, epoch=weights.epoch, version=weights.version)
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


async def _read_body(receive: Receive) -> bytes:
    chunks = []
    num_bytes = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise CallerLeftError
        chunks.append(message.get("body", b""))
        num_bytes += len(chunks[-1])
        if num_bytes > MAX_BODY_BYTES:
            raise RefusedError(
                413,
                f"the body of POST /generate must be at most {MAX_BODY_BYTES} bytes, got more; send each prompt as its own call",
            )
        if not message.get("more_body", False):
            return b"".join(chunks)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _session_id(scope: Scope) -> str | None:
    for name, value in scope["headers"]:
        if name == SESSION_HEADER:
            return str(value.decode("latin-1"))
    return None


async def _send_reply(send: Send, reply: Reply) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(reply.body))]
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "http.response.body", "body": reply.body})
