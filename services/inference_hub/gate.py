"""Whether any engine may take generate calls, why not, and for how long. Pure: the calls themselves wait in the dispatcher."""

import time
from collections.abc import Callable
from enum import StrEnum


class Hold(StrEnum):
    """Why calls are held; the text completes "calls are held because …"."""

    WEIGHT_UPDATE = "a weight update pauses generation"
    NO_ENGINE = "no engine holds the weights in force"


class Gate:
    """Open while nothing holds it. Each reason is closed and opened by its one owner, in any order."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """Args: clock: seconds that never go back."""
        self._clock = clock
        self._reasons: set[Hold] = set()
        self._closed_since = 0.0
        self._closed_s = 0.0
        self.on_open: Callable[[], object] = lambda: None
        """Called when the last reason ends."""

    @property
    def is_open(self) -> bool:
        return not self._reasons

    @property
    def reasons(self) -> list[Hold]:
        return sorted(self._reasons)

    @property
    def closed_s(self) -> float:
        """Seconds in which it was closed until now: what lies between two readings is how long a call was held between them."""
        return self._closed_s if self.is_open else self._closed_s + self._clock() - self._closed_since

    def hold(self, reason: Hold) -> None:
        if self.is_open:
            self._closed_since = self._clock()
        self._reasons.add(reason)

    def release(self, reason: Hold) -> None:
        if self._reasons != {reason}:
            self._reasons.discard(reason)
            return
        self._closed_s = self.closed_s
        self._reasons.clear()
        self.on_open()
