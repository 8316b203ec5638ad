"""SIGTERM and SIGINT as a wish that the training loop grants at its next step boundary."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopInterrupt(Exception):  # noqa: N818 - not an error
    """Raised inside `StopSignal.interrupting` when the wish arrives."""


class StopSignal:
    """`is_set` from the first SIGTERM or SIGINT on."""

    def __init__(self) -> None:
        self.is_set = False
        self._may_interrupt = False

    def install(self) -> None:
        signal.signal(signal.SIGTERM, self._receive)
        signal.signal(signal.SIGINT, self._receive)

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """A stretch of waiting that may be cut short and has nothing to lose: StopInterrupt is raised in it."""
        if self.is_set:
            raise StopInterrupt
        self._may_interrupt = True
        try:
            yield
        finally:
            self._may_interrupt = False

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.is_set = True
        if self._may_interrupt:
            self._may_interrupt = False
            raise StopInterrupt
