"""One deadline for all generate calls without a timer for each, which would cost as much as the rest of a call's bookkeeping."""

import asyncio
import time
from collections.abc import Callable
from typing import Final

MAX_LOOK_S: Final = 1.0
LOOKS_PER_TIMEOUT: Final = 8


class CallDeadlines:
    """The running calls, oldest first. One older than `timeout_s` is cancelled, late by an eighth of that or a second at most."""

    def __init__(self, timeout_s: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self.timeout_s = timeout_s
        self._clock = clock
        self._began_by_task: dict[asyncio.Task[object], float] = {}
        self._overdue: set[asyncio.Task[object]] = set()

    def begin(self, task: asyncio.Task[object], now: float) -> None:
        self._began_by_task[task] = now

    def end(self, task: asyncio.Task[object]) -> bool:
        """The call is over. Returns whether its deadline had passed and nothing else cancelled it."""
        self._began_by_task.pop(task, None)
        if task not in self._overdue:
            return False
        self._overdue.discard(task)
        return task.uncancel() == 0

    def cancel_overdue(self, now: float) -> None:
        while self._began_by_task:
            task, began = next(iter(self._began_by_task.items()))
            if now - began < self.timeout_s:
                return
            del self._began_by_task[task]
            self._overdue.add(task)
            task.cancel()

    async def watch(self) -> None:
        """Looks until it is cancelled."""
        while True:
            await asyncio.sleep(min(MAX_LOOK_S, self.timeout_s / LOOKS_PER_TIMEOUT))
            self.cancel_overdue(self._clock())
