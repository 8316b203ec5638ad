"""What is told to whoever shows the processes of a run."""

from enum import StrEnum
from typing import Protocol


class State(StrEnum):
    STARTING = "starting"
    READY = "ready"
    RUNNING = "running"
    STOPPING = "stopping"
    STOPPED = "stopped"


class Observer(Protocol):
    """Who is told what happens; called from the event loop, so it must not block."""

    def state_changed(self, name: str, state: State, seconds: float) -> None:
        """`seconds` since the state before it."""

    def restarts(self, name: str, ending: str, delay_s: float) -> None:
        """The process ended as `ending` says, and is started again in `delay_s`."""

    def line_written(self, name: str, line: str) -> None:
        """One line of a process's output."""
