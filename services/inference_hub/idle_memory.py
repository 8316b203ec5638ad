"""When to give memory back that a burst of calls left behind: a hub that once had 10,000 calls open would stay as large as then."""

from typing import Final

MIN_CALLS: Final = 1_000
"""Calls at once that make it worth while."""
IDLE_S: Final = 8.0
"""After the last call: the connections that calls left are closed by then."""


class IdleMemory:
    """BUSY → idle for IDLE_S → given back once → BUSY. Looked at now and then."""

    def __init__(self) -> None:
        self._most_calls = 0
        self._idle_since = 0.0

    def is_due(self, now: float, num_calls: int) -> bool:
        """Whether to give memory back now, in a look that finds so many calls."""
        if num_calls:
            self._most_calls = max(self._most_calls, num_calls)
            self._idle_since = now
        if self._most_calls < MIN_CALLS or now - self._idle_since < IDLE_S:
            return False
        self._most_calls = 0
        return True
