"""What happened to a run, in words and in order: what was killed when, who noticed, what recovered."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class Mark(StrEnum):
    FAULT = "FAULT"
    NOTICED = "noticed"
    RECOVERED = "RECOVERED"
    NOTE = ""


@dataclass(frozen=True)
class Event:
    at_s: float
    """Since the timeline began."""
    mark: Mark
    who: str
    """The part that was hit, that noticed, or that recovered."""
    text: str

    def __str__(self) -> str:
        return f"{self.at_s:8.2f} s  {self.mark:<9}  {self.who:<9} {self.text}"


class Timeline:
    """Any thread may add to it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._lock = threading.Lock()
        self._events: list[Event] = []

    @property
    def events(self) -> list[Event]:
        with self._lock:
            return sorted(self._events, key=lambda event: event.at_s)

    def fault(self, who: str, text: str) -> None:
        self._add(Mark.FAULT, who, text)

    def noticed(self, who: str, text: str) -> None:
        self._add(Mark.NOTICED, who, text)

    def recovered(self, who: str, text: str) -> None:
        self._add(Mark.RECOVERED, who, text)

    def note(self, who: str, text: str) -> None:
        self._add(Mark.NOTE, who, text)

    def __str__(self) -> str:
        return "".join(f"{event}\n" for event in self.events)

    def write(self, path: Path) -> None:
        path.write_text(str(self))

    def _add(self, mark: Mark, who: str, text: str) -> None:
        with self._lock:
            self._events.append(Event(self._clock() - self._began, mark, who, text))
