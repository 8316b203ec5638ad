"""How an engine's time goes, as seconds that only rise: what lies between two readings is exact, however far apart they are."""

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """What an engine says it can hold at the same time; None where it does not say."""

    calls: int | None = None
    tokens: int | None = None
    """Of its KV cache."""

    def share_used(self, num_calls: int, num_tokens: int) -> float | None:
        """Of the limit that is nearer, at most 1.

        An upper bound where it is of tokens: a call counts with all that it may yet sample (max_new_tokens), and what calls share
        in the prefix cache counts for each.
        """
        shares = [count / limit for count, limit in ((num_calls, self.calls), (num_tokens, self.tokens)) if limit]
        return min(1.0, max(shares)) if shares else None


@dataclass(frozen=True)
class UsageSeconds:
    """Of one engine, since this hub knows it. All are of the time in which it was ready, so idle_s + used_s <= ready_s."""

    ready_s: float
    """It could have got calls: alive, with the weights in force, not paused by a weight update."""
    idle_s: float
    """Of that, without any call of this hub."""
    used_s: float
    """Of that, each second weighted by the share of the engine's limits that its calls used; 0 where it has told none."""


class Usage:
    """Told of every change of an engine's state and of its calls; the seconds up to then are of the state before."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Args: clock: seconds that never go back."""
        self._clock = clock
        self._since = clock()
        self._is_ready = False
        self._num_calls = 0
        self._share_used = 0.0
        self._ready_s = 0.0
        self._idle_s = 0.0
        self._used_s = 0.0

    def readiness(self, is_ready: bool) -> None:
        """It is ready from now on, or is not."""
        self._advance()
        self._is_ready = is_ready

    def calls(self, num_calls: int, share_used: float | None) -> None:
        """It has `num_calls` from now on, which use such a share of its limits."""
        self._advance()
        self._num_calls = num_calls
        self._share_used = share_used or 0.0

    def read(self) -> UsageSeconds:
        self._advance()
        return UsageSeconds(self._ready_s, self._idle_s, self._used_s)

    def _advance(self) -> None:
        now = self._clock()
        seconds, self._since = now - self._since, now
        if self._is_ready:
            self._ready_s += seconds
            self._idle_s += seconds if self._num_calls == 0 else 0.0
            self._used_s += seconds * self._share_used
