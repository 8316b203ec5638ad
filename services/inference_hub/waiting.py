"""Calls that wait in the hub for a place in an engine, and whose turn it is. Pure.

Order: validation, then the next turns of running episodes, then new episodes. Within one of these the environment with the fewest
tokens in engines is next, and of its calls the oldest. A call that has its prefix in an engine's cache waits for that engine.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from heapq import heappop, heappush
from typing import Final, Generic, TypeVar

MAX_STALE: Final = 64
"""Numbers of those who left that a queue may keep, beyond as many as wait in it."""

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
    number: int
    """Its place in the order of arrival."""
    bind: Callable[[EngineT], object]
    session_id: str | None = None
    avoided_ids: frozenset[str] = frozenset()
    """Engines to take only while no other has a place."""
    engine_id: str | None = None
    """The engine it waits for; None if any will do."""


class _Queue(Generic[EngineT]):
    """The oldest first, in whichever order they came. Who leaves is dropped from the heap when its turn would have come."""

    def __init__(self) -> None:
        self.by_number: dict[int, Waiter[EngineT]] = {}
        self._numbers: list[int] = []

    def add(self, waiter: Waiter[EngineT]) -> None:
        self.by_number[waiter.number] = waiter
        heappush(self._numbers, waiter.number)
        if len(self._numbers) > MAX_STALE + 2 * len(self.by_number):
            self._numbers = sorted(self.by_number)

    @property
    def head(self) -> Waiter[EngineT]:
        while self._numbers[0] not in self.by_number:
            heappop(self._numbers)
        return self.by_number[self._numbers[0]]


class WaitingCalls(Generic[EngineT]):
    """Queues by rank, engine waited for, and environment. All operations are O(environments + log calls), amortised."""

    def __init__(self) -> None:
        self._queues: dict[tuple[Rank, str | None], dict[str, _Queue[EngineT]]] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, waiter: Waiter[EngineT]) -> None:
        by_environment = self._queues.setdefault((waiter.rank, waiter.engine_id), {})
        if waiter.environment not in by_environment:
            by_environment[waiter.environment] = _Queue()
        by_environment[waiter.environment].add(waiter)
        self._size += 1

    def remove(self, waiter: Waiter[EngineT]) -> bool:
        """Returns whether it was waiting."""
        by_environment = self._queues.get((waiter.rank, waiter.engine_id), {})
        queue = by_environment.get(waiter.environment)
        if queue is None or queue.by_number.pop(waiter.number, None) is None:
            return False
        if not queue.by_number:
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
            heads = [queue.head for waited_for in (engine_id, None) for queue in self._queues.get((rank, waited_for), {}).values()]
            heads.sort(key=lambda waiter: (tokens_by_environment.get(waiter.environment, 0), waiter.number))
            for head in heads:
                if is_allowed(head):
                    return head
        return None

    def waiting_for(self, engine_id: str) -> list[Waiter[EngineT]]:
        return [
            waiter
            for rank in Rank
            for queue in self._queues.get((rank, engine_id), {}).values()
            for waiter in queue.by_number.values()
        ]

    @property
    def engine_ids(self) -> set[str]:
        """Engines that calls wait for."""
        return {engine_id for _, engine_id in self._queues if engine_id is not None}
