"""`POST /generate`, the hot path: wait for a place → relay → resume.

A request goes to the engine as the bytes that came, with the hub's fields after them, and an answer that needs no joining comes
back as the bytes the engine sent.
"""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping
from itertools import count
from typing import Any, Final

from services.inference_hub.access import Access
from services.inference_hub.call_deadlines import CallDeadlines
from services.inference_hub.caller_connection import Headers
from services.inference_hub.dispatcher import Arrival, Dispatcher
from services.inference_hub.engine_client import EngineUnreachableError
from services.inference_hub.engines import Engine, EngineRegistry
from services.inference_hub.gate import Gate
from services.inference_hub.idle_memory import IdleMemory
from services.inference_hub.metrics import Metrics
from services.inference_hub.resume import (
    Call,
    RefusedError,
    Reply,
    body_too_large,
    error_reply,
    parse_request,
)
from services.inference_hub.routing import StrategyName, strategy
from services.inference_hub.sessions import Sessions
from services.inference_hub.waiting import WaitingCalls
from shared.errors import EngineError
from shared.freed_memory import give_back

Scope = Mapping[str, Any]
Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

AUTHORIZATION_HEADER: Final = b"authorization"
SESSION_HEADER: Final = b"x-session-id"
ENVIRONMENT_HEADER: Final = b"x-environment"
ENDED_HEADER: Final = b"x-ended-sessions"
PURPOSE_HEADER: Final = b"x-purpose"
VALIDATION: Final = b"validation"
RETRY_AFTER_S: Final = 5
MAX_ENDED: Final = 256
"""Sessions that one call may end."""
LOOK_S: Final = 1.0


class CallerLeftError(Exception):
    """The caller closed its connection before it had sent its request."""


class GenerateEndpoint:
    """Answers one generate call for each ASGI request. `tasks` owns the aborts of requests whose callers left."""

    def __init__(
        self,
        registry: EngineRegistry,
        gate: Gate,
        waiting: WaitingCalls[Engine],
        metrics: Metrics,
        access: Access,
        tasks: asyncio.TaskGroup,
        *,
        timeout_s: float,
        max_attempts: int,
        max_waiting_calls: int,
        max_body_bytes: int,
        segment_tokens: int | None,
        strategy_name: StrategyName,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Args: clock: seconds that never go back."""
        self._registry = registry
        self._gate = gate
        self._metrics = metrics
        self._access = access
        self._tasks = tasks
        self._clock = clock
        self._deadlines = CallDeadlines(timeout_s, clock)
        self._numbers = count(1)
        self._rids = request_ids()
        self._max_attempts = max_attempts
        self._max_waiting_calls = max_waiting_calls
        self.max_body_bytes = max_body_bytes
        self._segment_tokens = segment_tokens
        self._loop = asyncio.get_running_loop()
        self.dispatcher: Dispatcher[Engine] = Dispatcher(
            lambda: registry.routable if gate.is_open else (), strategy(strategy_name), Sessions(), waiting, clock=clock
        )
        registry.on_change = gate.on_open = self.dispatcher.engines_changed
        self.num_calls = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The same as an ASGI application, for a connection that also carries other requests."""
        try:
            body = await _read_body(receive, self.max_body_bytes)
        except CallerLeftError:
            return
        if body is None:
            await send_reply(send, body_too_large(self.max_body_bytes))
            return
        async with asyncio.TaskGroup() as tasks:
            answering = tasks.create_task(self.answer(body, dict(scope["headers"])))
            leaving = tasks.create_task(_disconnected(receive))
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
            answering.cancel()
            leaving.cancel()
        if not answering.cancelled():
            await send_reply(send, answering.result())

    async def answer(self, body: bytes, headers: Headers) -> Reply:
        """The answer to one call. It is cancelled when the caller leaves, and then the engine is told to stop."""
        task = asyncio.current_task()
        assert task is not None
        arrived = self._clock()
        self.num_calls += 1
        self._deadlines.begin(task, arrived)
        call = None
        try:
            if not self._access.may_generate(headers.get(AUTHORIZATION_HEADER)):
                return refused_access(is_generate=True)
            call = self._accept(body)
            if ENDED_HEADER in headers:
                self._end_sessions(headers[ENDED_HEADER])
            reply = await self._settle(call, _arrival(next(self._numbers), call, headers))
        except RefusedError as error:
            reply = error_reply(error.status, str(error), headers=error.headers)
        except asyncio.CancelledError:
            if not self._deadlines.end(task):
                self._metrics.abandoned_calls.inc()
                raise
            assert call is not None
            reply = self._overdue(call)
        finally:
            self._deadlines.end(task)
            self.num_calls -= 1
        seconds = self._clock() - arrived
        self._metrics.calls.labels(reply.status).inc()
        self._metrics.call_seconds.observe(seconds)
        if call is not None:
            self._metrics.by_engine.added(seconds - call.waited_s - call.engine_s)
        self._metrics.output_tokens.inc(reply.num_tokens)
        return reply

    async def watch(self) -> None:
        """Holds calls to their deadline, lets episodes begin in place of silent ones, closes old connections and gives memory back,
        until it is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._deadlines.watch())
            memory = IdleMemory()
            while True:
                await asyncio.sleep(LOOK_S)
                self.dispatcher.look()
                for engine in self._registry.by_id.values():
                    engine.client.close_old()
                if memory.is_due(self._clock(), self.num_calls):
                    give_back()

    def _end_sessions(self, session_ids: bytes) -> None:
        for session_id in session_ids.decode("latin-1").split(",")[:MAX_ENDED]:
            self.dispatcher.end_session(session_id.strip())

    def _accept(self, body: bytes) -> Call:
        if len(self.dispatcher.waiting) >= self._max_waiting_calls:
            raise RefusedError(
                429,
                f"at most {self._max_waiting_calls} generate calls may wait in the hub (inference_hub.max_waiting_calls), and as "
                f"many do; send this one again in {RETRY_AFTER_S} s",
                headers=(("retry-after", str(RETRY_AFTER_S)),),
            )
        limits = self._registry.request_limits
        request = parse_request(body, limits.vocabulary)
        limits.check(request.num_prompt_tokens, request.asked_tokens)
        return Call(request, max_attempts=self._max_attempts, segment_tokens=self._segment_tokens)

    async def _settle(self, call: Call, caller: Arrival) -> Reply:
        """Attempts until one settles the call."""
        reply = None
        while reply is None:
            if call.delay_s:
                call.waited_s += call.delay_s
                await asyncio.sleep(call.delay_s)
            engine = self._engine_of_segments(call, caller) or await self._place(call, caller)
            if engine in self._registry.routable and self._gate.is_open:
                reply = await self._attempt(call, caller, engine)
            else:
                self.dispatcher.done(engine, caller)  # It became unusable between the binding and this call's turn to run.
        return reply

    def _overdue(self, call: Call) -> Reply:
        held = f"calls are held because {' and '.join(self._gate.reasons)}; " if not self._gate.is_open else ""
        return error_reply(
            503,
            f"a generate call must be answered within {self._deadlines.timeout_s:g} s (inference_hub.generate_timeout_s), and was "
            f"not after {call.num_attempts} attempts: {held}{call.history}; GET /engines says what state each engine is in",
        )

    async def _attempt(self, call: Call, caller: Arrival, engine: Engine) -> Reply | None:
        """One attempt, whose place in the engine is free again afterwards."""
        rid = next(self._rids)
        weights = engine.weights
        began_in_round = engine.limit.round
        began = self._clock()
        try:
            status, answer = await engine.client.generate(call.begin(rid=rid, epoch=weights.epoch, version=weights.version))
        except asyncio.CancelledError:
            self._abort_later(engine, rid)
            raise
        except EngineUnreachableError as error:
            self._metrics.by_engine.failed(engine.id, caller.environment, "unreachable")
            self._registry.suspect(engine, str(error))
            call.unreached(engine.id)
            return None
        except EngineError as error:
            if not engine.is_gone:
                self._metrics.by_engine.failed(engine.id, caller.environment, "cut" if engine.is_verified else "lost")
            self._registry.suspect(engine, str(error))
            return call.failed(engine.id, str(error))
        finally:
            engine_s = self._clock() - began
            call.engine_s += engine_s
            self.dispatcher.done(engine, caller)
        engine.has_answered = True
        kept_before = call.num_received_tokens
        reply = call.answered(engine.id, status, answer, has_early_labels=engine.has_early_labels)
        if call.is_between_segments:
            call.last_engine_id = engine.id
        elif reply is None:
            self._metrics.by_engine.failed(engine.id, caller.environment, "aborted" if status == 200 else "server_error")
            self._metrics.resumed_tokens.inc(call.num_received_tokens - kept_before)
        elif reply.status == 200:
            self.dispatcher.answered(engine, caller, reply.num_tokens)
            self._metrics.by_engine.answered(
                engine.id,
                caller.environment,
                prompt_tokens=caller.prompt_tokens,
                cached_tokens=reply.cached_tokens,
                output_tokens=reply.num_tokens,
                engine_s=engine_s,
                first_token_s=reply.first_token_s,
            )
            is_full = engine.num_outstanding_calls + 1 >= engine.limit.value
            engine.limit.answered(began_in_round=began_in_round, num_retractions=reply.num_retractions, was_full=is_full)
        return reply

    def _abort_later(self, engine: Engine, rid: str) -> None:
        abort = _abort(engine, rid)
        try:
            self._tasks.create_task(abort)
        except RuntimeError:  # The hub stops. The engine notices the closed connection by itself, only later.
            abort.close()

    async def _place(self, call: Call, caller: Arrival) -> Engine:
        """An engine with a place for the call, taken. Cancelling it gives the place back."""
        bound = _Bound(self._loop)
        arrived = self.dispatcher.arrive(caller, bound, avoided_ids=frozenset(call.failed_engine_ids))
        if isinstance(arrived, Engine):
            return arrived
        since, closed_s = self._clock(), self._gate.closed_s
        try:
            return await bound.future
        except asyncio.CancelledError:
            if not self.dispatcher.leave(arrived):
                assert bound.engine is not None
                self.dispatcher.done(bound.engine, caller)
            raise
        finally:
            waited_s = self._clock() - since
            held_s = min(waited_s, self._gate.closed_s - closed_s)
            call.waited_s += waited_s
            self._metrics.by_engine.waited(caller.environment, held_s=held_s, queued_s=waited_s - held_s)

    def _engine_of_segments(self, call: Call, caller: Arrival) -> Engine | None:
        """The engine that holds the segments so far, taken whether or not it has a place: the call had one there."""
        if not call.is_between_segments:
            return None
        engine = next((engine for engine in self._registry.routable if engine.id == call.last_engine_id), None)
        return None if engine is None else self.dispatcher.take(engine, caller)


class _Bound:
    """What a waiting call is bound with: its engine, which has to be given back if the call was cancelled meanwhile."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.future: asyncio.Future[Engine] = loop.create_future()
        self.engine: Engine | None = None

    def __call__(self, engine: Engine) -> None:
        self.engine = engine
        if not self.future.done():
            self.future.set_result(engine)


def _arrival(number: int, call: Call, headers: Headers) -> Arrival:
    return Arrival(
        number,
        session_id=headers.get(SESSION_HEADER, b"").decode("latin-1") or None,
        environment=headers.get(ENVIRONMENT_HEADER, b"").decode("latin-1"),
        is_validation=headers.get(PURPOSE_HEADER) == VALIDATION,
        prompt_tokens=call.prompt_tokens,
        cost_tokens=call.cost_tokens,
    )


async def _abort(engine: Engine, rid: str) -> None:
    try:
        await engine.client.abort(rid)
    except EngineError:
        # The engine notices the closed connection by itself, only later; a dead one has nothing to abort.
        pass
    finally:
        if engine.is_gone:
            await engine.client.close()


def refused_access(*, is_generate: bool) -> Reply:
    return error_reply(401, Access.sentence(is_generate=is_generate), headers=(("www-authenticate", "Bearer"),))


def request_ids() -> Iterator[str]:
    """Ids of one length, because SGLang aborts by prefix, that no other hub uses."""
    prefix = uuid.uuid4().hex[:20]
    return (f"{prefix}{number:012x}" for number in count())


async def _read_body(receive: Receive, max_bytes: int) -> bytes | None:
    """None if it is over the limit. Raises: CallerLeftError."""
    chunks = []
    num_bytes = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise CallerLeftError
        chunks.append(message.get("body", b""))
        num_bytes += len(chunks[-1])
        if num_bytes > max_bytes:
            return None
        if not message.get("more_body", False):
            return b"".join(chunks)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_reply(send: Send, reply: Reply) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(reply.body))]
    headers += [(name.encode(), value.encode()) for name, value in reply.headers]
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "http.response.body", "body": reply.body})
