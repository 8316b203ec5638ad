"""An event loop whose clock stands still while anything can progress, and then jumps to the next timer.

    ready callbacks run  →  outstanding real I/O is awaited  →  the clock jumps  →  the timer's callbacks run

Real I/O is whatever happens inside `real_io()`, and whatever runs in a thread of an executor. Sockets are polled only when no
callback is ready, so with one request outstanding at a time the order of events does not depend on how fast the answer came.
"""

import asyncio
import contextlib
import selectors
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Executor
from typing import Any, ClassVar, TypeVar

Result = TypeVar("Result")


class RealIOStuckError(RuntimeError):
    """Real I/O that the clock waits for did not end."""


class StandstillError(RuntimeError):
    """Nothing is ready, no timer is set and no I/O is outstanding: every task waits for another."""


class _Selector(selectors.DefaultSelector):
    """Asks `wait` instead of the operating system how to spend a timeout."""

    wait: Callable[[float | None], list[tuple[selectors.SelectorKey, int]]]

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        return self.wait(timeout)

    def poll(self, timeout: float) -> list[tuple[selectors.SelectorKey, int]]:
        """What the operating system has, within real seconds."""
        return super().select(timeout)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """`time()` is in virtual seconds since the loop was made."""

    REAL_TIMEOUT_S: ClassVar = 60.0
    """Real seconds that outstanding I/O may take."""

    def __init__(self) -> None:
        self._virtual_s = 0.0
        self._num_outstanding = 0
        self._virtual_selector = _Selector()
        self._virtual_selector.wait = self._wait
        super().__init__(self._virtual_selector)

    def time(self) -> float:
        return self._virtual_s

    @contextlib.contextmanager
    def real_io(self) -> Iterator[None]:
        """Holds the clock within its block."""
        self._num_outstanding += 1
        try:
            yield
        finally:
            self._num_outstanding -= 1

    def run_in_executor(self, executor: Executor | None, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        future = super().run_in_executor(executor, func, *args)
        self._num_outstanding += 1
        future.add_done_callback(self._end_outstanding)
        return future

    async def shutdown_default_executor(self, *args: Any, **options: Any) -> None:
        with self.real_io():
            await super().shutdown_default_executor(*args, **options)

    def _end_outstanding(self, _: object) -> None:
        self._num_outstanding -= 1

    def _wait(self, timeout: float | None) -> list[tuple[selectors.SelectorKey, int]]:
        """Args: timeout: virtual seconds to the next timer, 0 if callbacks are ready, None if no timer is set."""
        if timeout is not None and timeout <= 0:
            return []
        if self._num_outstanding:
            return self._await_real_io()
        if events := self._virtual_selector.poll(0):  # Such as a thread's call_soon_threadsafe.
            return events
        if timeout is None:
            raise StandstillError("every task waits for another, and no timer is set")
        self._virtual_s += timeout
        return []

    def _await_real_io(self) -> list[tuple[selectors.SelectorKey, int]]:
        deadline = time.monotonic() + self.REAL_TIMEOUT_S
        while time.monotonic() < deadline:
            if events := self._virtual_selector.poll(1.0):
                return events
        raise RealIOStuckError(f"{self._num_outstanding} real operations did not end within {self.REAL_TIMEOUT_S:g} s")


def virtual_loop() -> VirtualTimeLoop:
    """The running loop. Raises: TypeError if its time is real."""
    loop = asyncio.get_running_loop()
    if not isinstance(loop, VirtualTimeLoop):
        raise TypeError(f"the running loop must be a VirtualTimeLoop, got {type(loop).__name__}")
    return loop


def run(main: Coroutine[Any, Any, Result]) -> Result:
    """`asyncio.run` under virtual time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
