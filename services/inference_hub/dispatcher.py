"""Late binding: a call gets an engine when one has a place for it, and waits in the hub until then. Pure, without tasks.

An engine's queue is first come, first served, and its cache forgets what was used least recently. A call that waits in the hub can
still be overtaken, go to another engine, or leave; and if fewer episodes are under way than the caches hold, each next turn finds
its prefix there.

    arrive ──an engine has a place──► bound ──► done
       └──► waiting ──a place is free──┘

While no engine may take calls at all they wait here too, so there is one order in which they go, whatever they waited for.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

from services.inference_hub.limits import CallLimit
from services.inference_hub.routing import Strategy, choose, is_overloaded
from services.inference_hub.sessions import Sessions
from services.inference_hub.waiting import Rank, Waiter, WaitingCalls

CACHE_SHARE: Final = 0.9
"""Of an engine's KV cache that prompts of running calls may fill."""
EPISODES_SHARE: Final = 1.05
"""Of an engine's KV cache that running episodes may fill, at the length each is expected to end with, before another begins there.
Above 1, because most are shorter yet; from 1.2 on their prefixes push each other out (benchmarks/hub's engine model)."""


class Placed(Protocol):
    """What the dispatcher looks at in an engine."""

    @property
    def id(self) -> str: ...
    @property
    def outstanding_tokens(self) -> int: ...
    @property
    def outstanding_prompt_tokens(self) -> int: ...
    @property
    def num_outstanding_calls(self) -> int: ...
    @property
    def limit(self) -> CallLimit: ...
    @property
    def cache_tokens(self) -> int:
        """KV cache size; 0 if unknown."""
        ...

    def begin_call(self, *, prompt_tokens: int, cost_tokens: int) -> None: ...
    def end_call(self, *, prompt_tokens: int, cost_tokens: int) -> None: ...


EngineT = TypeVar("EngineT", bound=Placed)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A call as the dispatcher sees it, the same for all its attempts."""

    number: int
    """Its place in the order of arrival, which another attempt keeps."""
    session_id: str | None
    environment: str
    is_validation: bool
    prompt_tokens: int
    cost_tokens: int


class Dispatcher(Generic[EngineT]):
    """Gives places in engines to calls. `engines` are those that may get calls now."""

    def __init__(
        self,
        engines: Callable[[], Sequence[EngineT]],
        strategy: Strategy,
        sessions: Sessions,
        waiting: WaitingCalls[EngineT] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engines = engines
        self._strategy = strategy
        self._is_sticky = strategy is choose
        self._sessions = sessions
        self._clock = clock
        self._tokens_by_environment: Counter[str] = Counter()
        self.waiting: WaitingCalls[EngineT] = WaitingCalls() if waiting is None else waiting

    def arrive(
        self, call: Arrival, bind: Callable[[EngineT], object], *, avoided_ids: frozenset[str] = frozenset()
    ) -> EngineT | Waiter[EngineT]:
        """The engine that has a place for it, taken; or its place among the waiting, whose `bind` gets the engine later.

        Args: avoided_ids: engines that failed on it, to be taken only while no other has a place.
        """
        waiter = self._waiter(call, bind, avoided_ids)
        engine = self._place(waiter)
        if engine is None:
            self.waiting.add(waiter)
            return waiter
        self._begin(engine, waiter)
        return engine

    def leave(self, waiter: Waiter[EngineT]) -> bool:
        """The caller left. Returns whether it was still waiting; if not, it holds a place."""
        return self.waiting.remove(waiter)

    def take(self, engine: EngineT, call: Arrival) -> EngineT:
        """A place in this engine, whether or not it has one: for a call that goes on where it was."""
        self._begin(engine, self._waiter(call, lambda engine: None, frozenset()))
        return engine

    def done(self, engine: EngineT, call: Arrival) -> None:
        """A call's place is free again."""
        engine.end_call(prompt_tokens=call.prompt_tokens, cost_tokens=call.cost_tokens)
        self._tokens_by_environment[call.environment] -= call.cost_tokens
        if not self._tokens_by_environment[call.environment]:
            del self._tokens_by_environment[call.environment]
        if self.waiting:
            self.offer(engine)

    def answered(self, engine: EngineT, call: Arrival, num_tokens: int) -> None:
        """The engine's cache holds the call's prompt and `num_tokens` more."""
        if call.session_id:
            self._sessions.hold(
                call.session_id, engine.id, call.prompt_tokens + num_tokens, most_tokens=call.cost_tokens, now=self._clock()
            )

    def end_session(self, session_id: str) -> None:
        """An episode is over, so another may begin where it was."""
        self._sessions.end(session_id)
        self.engines_changed()

    def look(self) -> None:
        """To be called now and then: silent episodes no longer keep others from beginning."""
        if self._sessions.release_silent(self._clock()):
            self.engines_changed()

    def offer(self, engine: EngineT) -> None:
        """Gives the engine's free places to whose turn it is."""
        engines = self._engines()
        while engine in engines and self._offer_one(engine, engines) is not None:
            pass

    def engines_changed(self) -> None:
        """Engines came or went, or an engine's limit did: those that waited for one that is gone may go anywhere.

        Each free place goes to the engine with the least to do, so that a crowd which waited for a weight update is spread.
        """
        engines = self._engines()
        if not self.waiting or not engines:
            return
        for gone in self.waiting.engine_ids - {engine.id for engine in engines}:
            self._release(gone)
        offering = list(engines)
        while self.waiting and offering:
            engine = min(offering, key=lambda engine: engine.outstanding_tokens)
            if engine.id in self.waiting.engine_ids and is_overloaded(engine, engines, cost_tokens=0):
                self._release(engine.id)
                offering = list(engines)
            elif (bound := self._offer_one(engine, engines)) is None:
                offering.remove(engine)
            elif bound.avoided_ids:
                offering = list(engines)  # Those it avoided were asked for it, and not for who is next.

    def _offer_one(self, engine: EngineT, engines: Sequence[EngineT]) -> Waiter[EngineT] | None:
        """Who was bound: whose turn it is in `engine`, if it has a place for it."""
        waiter = self.waiting.next_for(
            engine.id, self._tokens_by_environment, is_allowed=lambda waiter: self._may_take(engine, waiter, engines)
        )
        if waiter is not None:
            self.waiting.remove(waiter)
            self._begin(engine, waiter)
            waiter.bind(engine)
        return waiter

    def _release(self, engine_id: str) -> None:
        """Those that wait for this engine may go anywhere."""
        for waiter in self.waiting.waiting_for(engine_id):
            self.waiting.remove(waiter)
            waiter.engine_id = None
            self.waiting.add(waiter)

    def _waiter(self, call: Arrival, bind: Callable[[EngineT], object], avoided_ids: frozenset[str]) -> Waiter[EngineT]:
        is_running = call.session_id is not None and self._sessions.engine_id(call.session_id) is not None
        rank = Rank.VALIDATION if call.is_validation else Rank.NEXT_TURN if is_running else Rank.NEW_EPISODE
        return Waiter(rank, call.environment, call.prompt_tokens, call.cost_tokens, call.number, bind, call.session_id, avoided_ids)

    def _place(self, waiter: Waiter[EngineT]) -> EngineT | None:
        """The engine for it now, or None; then `waiter` says which engine it waits for."""
        engines = self._engines()
        preferred_id = self._sessions.engine_id(waiter.session_id) if waiter.session_id else None
        if self._is_sticky and preferred_id is not None and preferred_id not in waiter.avoided_ids:
            preferred = next((engine for engine in engines if engine.id == preferred_id), None)
            if not engines:
                waiter.engine_id = preferred_id
            elif preferred is not None and not is_overloaded(preferred, engines, cost_tokens=waiter.cost_tokens):
                waiter.engine_id = preferred.id
                if not self._has_place(preferred, waiter):
                    return None
        free = [engine for engine in engines if self._may_take(engine, waiter, engines)]
        if not free:
            return None
        return self._strategy(free, preferred_id=preferred_id, cost_tokens=waiter.cost_tokens)

    def _may_take(self, engine: EngineT, waiter: Waiter[EngineT], engines: Sequence[EngineT]) -> bool:
        if not self._has_place(engine, waiter):
            return False
        return engine.id not in waiter.avoided_ids or not any(
            other.id not in waiter.avoided_ids and self._has_place(other, waiter) for other in engines
        )

    def _has_place(self, engine: EngineT, waiter: Waiter[EngineT]) -> bool:
        if not engine.num_outstanding_calls:
            return True
        if engine.num_outstanding_calls >= engine.limit.value:
            return False
        if not engine.cache_tokens:
            return True
        if engine.outstanding_prompt_tokens + waiter.prompt_tokens > CACHE_SHARE * engine.cache_tokens:
            return False
        if waiter.rank is not Rank.NEW_EPISODE:
            return True
        expected_tokens = self._sessions.expected_tokens(waiter.prompt_tokens, waiter.cost_tokens)
        return self._sessions.held_tokens(engine.id) + expected_tokens <= EPISODES_SHARE * engine.cache_tokens

    def _begin(self, engine: EngineT, waiter: Waiter[EngineT]) -> None:
        engine.begin_call(prompt_tokens=waiter.prompt_tokens, cost_tokens=waiter.cost_tokens)
        self._tokens_by_environment[waiter.environment] += waiter.cost_tokens
        if waiter.session_id:
            self._sessions.hold(
                waiter.session_id, engine.id, waiter.prompt_tokens, most_tokens=waiter.cost_tokens, now=self._clock()
            )
