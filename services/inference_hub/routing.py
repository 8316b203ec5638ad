"""Which engine gets a call, out of those that have a place for it: strategies without state of engines or time."""

import random
from collections.abc import Sequence
from typing import Final, Literal, Protocol, TypeVar

LOAD_FACTOR: Final = 1.25
"""A session stays with its engine while that engine's load is below this multiple of the mean load."""


class Loaded(Protocol):
    """What routing looks at in an engine."""

    @property
    def id(self) -> str: ...

    @property
    def outstanding_tokens(self) -> int:
        """Prompt tokens and tokens still to be sampled of the calls it is answering, at most."""
        ...


EngineT = TypeVar("EngineT", bound=Loaded)
StrategyName = Literal["affinity", "least_tokens", "round_robin", "power_of_two"]


class Strategy(Protocol):
    def __call__(self, engines: Sequence[EngineT], *, preferred_id: str | None, cost_tokens: int) -> EngineT:
        """The engine for a call of `cost_tokens`, out of at least one."""
        ...


def is_overloaded(engine: Loaded, engines: Sequence[Loaded], *, cost_tokens: int) -> bool:
    """Whether its load > LOAD_FACTOR * mean load + cost: consistent hashing with bounded loads, arXiv:1608.01350, with the slack
    of one call."""
    mean_tokens = sum(other.outstanding_tokens for other in engines) / len(engines)
    return engine.outstanding_tokens > LOAD_FACTOR * mean_tokens + cost_tokens


def choose(engines: Sequence[EngineT], *, preferred_id: str | None, cost_tokens: int) -> EngineT:
    """Session affinity with bounded load: the engine whose cache holds the session's prefix, unless it is overloaded; otherwise
    the one with the least to do."""
    if preferred_id is not None:
        preferred = next((engine for engine in engines if engine.id == preferred_id), None)
        if preferred is not None and not is_overloaded(preferred, engines, cost_tokens=cost_tokens):
            return preferred
    return least_tokens(engines, preferred_id=None, cost_tokens=cost_tokens)


def least_tokens(engines: Sequence[EngineT], *, preferred_id: str | None, cost_tokens: int) -> EngineT:
    """The engine with the fewest outstanding tokens."""
    return min(engines, key=lambda engine: engine.outstanding_tokens)


class RoundRobin:
    """The engines in turn, by id, whichever of them there are."""

    def __init__(self) -> None:
        self._last_id = ""

    def __call__(self, engines: Sequence[EngineT], *, preferred_id: str | None, cost_tokens: int) -> EngineT:
        ordered = sorted(engines, key=lambda engine: engine.id)
        chosen = next((engine for engine in ordered if engine.id > self._last_id), ordered[0])
        self._last_id = chosen.id
        return chosen


class PowerOfTwo:
    """The less loaded of two engines drawn by chance (Mitzenmacher 2001)."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    def __call__(self, engines: Sequence[EngineT], *, preferred_id: str | None, cost_tokens: int) -> EngineT:
        drawn = self._chance.sample(engines, min(2, len(engines)))
        return least_tokens(drawn, preferred_id=None, cost_tokens=cost_tokens)


def strategy(name: StrategyName) -> Strategy:
    match name:
        case "affinity":
            return choose
        case "least_tokens":
            return least_tokens
        case "round_robin":
            return RoundRobin()
        case "power_of_two":
            return PowerOfTwo(random.Random())  # noqa: S311 - load, not secrets
