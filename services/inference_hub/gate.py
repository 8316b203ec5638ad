"""Holds generate calls while no engine may take them."""

import asyncio
from collections.abc import Callable
from enum import StrEnum


class Hold(StrEnum):
    """Why calls are held; the text completes "calls are held because …"."""

    WEIGHT_UPDATE = "a weight update pauses generation"
    NO_ENGINE = "no engine holds the weights in force"


class Gate:
    """Open while nothing holds it. Each reason is closed and opened by its one owner, in any order.

    Every call that waits is let through at once when the last reason ends; waiting costs nothing while the gate is open.
    """

    def __init__(self) -> None:
        self._reasons: set[Hold] = set()
        self._opened = asyncio.Event()
        self._opened.set()
        self.num_waiting = 0
        self.on_open: Callable[[], object] = lambda: None
        """Called when the last reason ends."""

    @property
    def is_open(self) -> bool:
        return not self._reasons

    @property
    def reasons(self) -> list[Hold]:
        return sorted(self._reasons)

    def hold(self, reason: Hold) -> None:
        self._reasons.add(reason)
        self._opened.clear()

    def release(self, reason: Hold) -> None:
        self._reasons.discard(reason)
        if not self._reasons and not self._opened.is_set():
            self._opened.set()
            self.on_open()

    async def passed(self) -> None:
        """Returns when the gate is open. The caller sets the deadline."""
        self.num_waiting += 1
        try:
            # A waiter resumes after the event was set, and the gate may have closed again since.
            while self._reasons:
                await self._opened.wait()
        finally:
            self.num_waiting -= 1
