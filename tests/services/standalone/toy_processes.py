"""Small real processes for the supervisor's tests."""

import sys

from services.standalone.keeper import Member
from services.standalone.observer import State
from services.standalone.processes import ProcessSpec
from services.standalone.supervisor import Stage

SLEEP = "import time; time.sleep(600)"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
WITH_GRANDCHILD = (
    "import subprocess, sys, time; "
    f"child = subprocess.Popen([sys.executable, '-c', {SLEEP!r}]); print('grandchild', child.pid, flush=True); time.sleep(600)"
)


def member(name: str, code: str, *, is_ready=None, stop_timeout_s: float = 10.0, ready_timeout_s: float = 60.0) -> Member:
    command = (sys.executable, "-S", "-c", code)
    return Member(ProcessSpec(name, command, stop_timeout_s=stop_timeout_s), is_ready, ready_timeout_s)


def stages(*members: Member) -> list[Stage]:
    return [Stage([one]) for one in members]


class Recorder:
    """An observer that remembers; `on_line` reacts to a line of output."""

    def __init__(self) -> None:
        self.states: list[tuple[str, State]] = []
        self.lines: list[tuple[str, str]] = []
        self.restarted: list[tuple[str, str]] = []
        self.on_line = lambda name, line: None

    def state_changed(self, name: str, state: State, seconds: float) -> None:
        self.states.append((name, state))

    def restarts(self, name: str, ending: str, delay_s: float) -> None:
        self.restarted.append((name, ending))

    def line_written(self, name: str, line: str) -> None:
        self.lines.append((name, line))
        self.on_line(name, line)

    def has_printed(self, name: str):
        """A probe: the process has printed something."""

        async def probe() -> bool:
            return any(writer == name for writer, _ in self.lines)

        return probe
