"""Calls that wait in the hub for a place in an engine, and whose turn it is. Pure.

Order: validation, then the next turns of running episodes, then new episodes. Within one of these the environment with the fewest
tokens in engines is next, and of its calls the oldest. A call that has its prefix in an engine's cache waits for that engine.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Generic, TypeVar

EngineT = TypeVar("EngineT")


class Rank(IntEnum):
    """What a call belongs to; the lowest is served first."""

    VALIDATION = 0
    NEXT_TURN = 1
    NEW_EPISODE = 2


@dataclass(eq=False, slots=True)
class Waiter(Generic[EngineT]):
    """A call that waits. `bind` is called once, with the engine that has a place for it."""

    rank: Rank
    environment: str
    prompt_tokens: int
    cost_tokens: int
    bind: Callable[[EngineT], object]
    session_id: str | None = None
    engine_id: str | None = None
    """The engine it waits for; None if any will do."""
    number: int = field(default=0)
    """Its place in the order of arrival."""


class WaitingCalls(Generic[EngineT]):
    """Queues by rank, engine waited for, and environment. All operations are O(environments)."""

    def __init__(self) -> None:
        self._queues: dict[tuple[Rank, str | None], dict[str, dict[int, Waiter[EngineT]]]] = {}
        self._num_arrived = 0
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, waiter: Waiter[EngineT]) -> None:
        """Behind those of its kind that arrived before; a waiter that was here before has kept its place."""
        if not waiter.number:
            self._num_arrived += 1
            waiter.number = self._num_arrived
        queue = self._queues.setdefault((waiter.rank, waiter.engine_id), {}).setdefault(waiter.environment, {})
        queue[waiter.number] = waiter
        self._size += 1

    def remove(self, waiter: Waiter[EngineT]) -> bool:
        """Returns whether it was waiting."""
        by_environment = self._queues.get((waiter.rank, waiter.engine_id), {})
        queue = by_environment.get(waiter.environment, {})
        if queue.pop(waiter.number, None) is None:
            return False
        if not queue:
            del by_environment[waiter.environment]
            if not by_environment:
                del self._queues[waiter.rank, waiter.engine_id]
        self._size -= 1
        return True

    def next_for(
        self, engine_id: str, tokens_by_environment: Mapping[str, int], *, is_allowed: Callable[[Waiter[EngineT]], bool]
    ) -> Waiter[EngineT] | None:
        """Whose turn it is in `engine_id`, still waiting. A rank whose first is not allowed lets the next rank through."""
        for rank in Rank:
            heads = [
                next(iter(queue.values()))
                for waited_for in (engine_id, None)
                for queue in self._queues.get((rank, waited_for), {}).values()
            ]
            heads.sort(key=lambda waiter: (tokens_by_environment.get(waiter.environment, 0), waiter.number))
            for head in heads:
                if is_allowed(head):
                    return head
        return None

    def waiting_for(self, engine_id: str) -> list[Waiter[EngineT]]:
        """Those that wait for this engine, oldest first."""
        found = [waiter for rank in Rank for queue in self._queues.get((rank, engine_id), {}).values() for waiter in queue.values()]
        return sorted(found, key=lambda waiter: waiter.number)

    @property
    def engine_ids(self) -> set[str]:
        """Engines that calls wait for."""
        return {engine_id for _, engine_id in self._queues if engine_id is not None}

    @property
    def all(self) -> list[Waiter[EngineT]]:
        return [waiter for kinds in self._queues.values() for queue in kinds.values() for waiter in queue.values()]
