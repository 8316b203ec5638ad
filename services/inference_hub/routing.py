"""Which engine gets a call: the session's own while it is not overloaded, else the one with the least to do."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, Protocol, TypeVar

LOAD_FACTOR: Final = 1.25
"""A session stays with its engine while that engine's load is below this multiple of the mean load."""
MAX_SESSIONS: Final = 65_536


class Loaded(Protocol):
    """What routing looks at in an engine."""

    @property
    def id(self) -> str: ...

    @property
    def outstanding_tokens(self) -> int:
        """Prompt tokens and tokens still to be sampled of the calls it is answering, at most."""
        ...


EngineT = TypeVar("EngineT", bound=Loaded)


def choose(engines: Sequence[EngineT], *, preferred_id: str | None, cost_tokens: int) -> EngineT:
    """The engine for a call of `cost_tokens`, out of at least one.

    The preferred engine holds the session's prefix in its cache, so it is taken while
    its load <= LOAD_FACTOR * mean load + cost: consistent hashing with bounded loads, arXiv:1608.01350, with the slack of one call.
    """
    preferred = next((engine for engine in engines if engine.id == preferred_id), None)
    if preferred is not None:
        mean_tokens = sum(engine.outstanding_tokens for engine in engines) / len(engines)
        if preferred.outstanding_tokens <= LOAD_FACTOR * mean_tokens + cost_tokens:
            return preferred
    return min(engines, key=lambda engine: engine.outstanding_tokens)


class Sessions:
    """Where each session was last routed; the least recently used are forgotten first, at the price of a cold prefix."""

    def __init__(self, capacity: int = MAX_SESSIONS) -> None:
        self._capacity = capacity
        self._engine_id_by_session: OrderedDict[str, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._engine_id_by_session)

    def engine_id(self, session_id: str) -> str | None:
        return self._engine_id_by_session.get(session_id)

    def remember(self, session_id: str, engine_id: str) -> None:
        self._engine_id_by_session[session_id] = engine_id
        self._engine_id_by_session.move_to_end(session_id)
        if len(self._engine_id_by_session) > self._capacity:
            self._engine_id_by_session.popitem(last=False)
