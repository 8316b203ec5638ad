"""How an engine's time goes, as seconds that only rise: what lies between two readings is exact, however far apart they are."""

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class UsageSeconds:
    """Of one engine, since this hub knows it. All are of the time in which it was ready, so 0 <= idle_s <= ready_s."""

    ready_s: float
    """It could have got calls: alive, with the weights in force, not paused by a weight update."""
    idle_s: float
    """Of that, without any call of this hub."""
    running_s: float
    """Summed over the calls that it ran at the same time, at most as many as it can."""


class Usage:
    """Told of every change of an engine's state and of its calls; the seconds up to then are of the state before."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Args: clock: seconds that never go back."""
        self._clock = clock
        self._since = clock()
        self._is_ready = False
        self._num_running = 0
        self._ready_s = 0.0
        self._idle_s = 0.0
        self._running_s = 0.0

    def readiness(self, is_ready: bool) -> None:
        """It is ready from now on, or is not."""
        self._advance()
        self._is_ready = is_ready

    def calls(self, num_calls: int, *, max_running_calls: int | None) -> None:
        """It has `num_calls` from now on, of which it runs `max_running_calls`, or all if that is not known."""
        self._advance()
        self._num_running = num_calls if max_running_calls is None else min(num_calls, max_running_calls)

    def read(self) -> UsageSeconds:
        self._advance()
        return UsageSeconds(self._ready_s, self._idle_s, self._running_s)

    def _advance(self) -> None:
        now = self._clock()
        seconds, self._since = now - self._since, now
        if self._is_ready:
            self._ready_s += seconds
            self._idle_s += seconds if self._num_running == 0 else 0.0
            self._running_s += seconds * self._num_running
