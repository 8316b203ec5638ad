"""What `headrace up` shows: each line of output behind its process's name, and what the run waits for."""

from rich.console import Console
from rich.status import Status
from rich.text import Text

from services.standalone.observer import State

COLOUR_BY_PROCESS = {"redis": "red", "engine": "magenta", "hub": "cyan", "agents": "green", "trainer": "yellow", "headrace": "bold"}
PREFIX_WIDTH = 9


class Terminal:
    """An observer that prints. On a terminal a spinner names the processes that are starting or stopping.

    What a process prints while it stops is in its log only: SGLang's exit alone is sixty lines that mean nothing.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._waiting: dict[str, State] = {}
        self._status = Status("", console=console) if console.is_terminal else None

    def state_changed(self, name: str, state: State, seconds: float) -> None:
        match state:
            case State.STARTING | State.STOPPING:
                self._waiting[name] = state
            case State.RUNNING:
                self._waiting.pop(name, None)
                self._say(f"{name} has started")
            case State.READY:
                self._waiting.pop(name, None)
                self._say(f"{name} is ready after {seconds:.1f} s")
            case State.STOPPED:
                self._waiting.pop(name, None)
                self._say(f"{name} has stopped")
        self._show_waiting()

    def restarts(self, name: str, ending: str, delay_s: float) -> None:
        self._say(f"{name} {ending}; it is started again in {delay_s:g} s")

    def line_written(self, name: str, line: str) -> None:
        if self._waiting.get(name) is not State.STOPPING:
            self._print(name, line)

    def close(self) -> None:
        if self._status:
            self._status.stop()

    def _say(self, sentence: str) -> None:
        self._print("headrace", sentence)

    def _print(self, name: str, line: str) -> None:
        colour = COLOUR_BY_PROCESS.get(name.partition("-")[0], "white")
        text = Text.assemble((f"{name:<{PREFIX_WIDTH}}│ ", colour), Text.from_ansi(line))
        self._console.print(text, soft_wrap=True, highlight=False)

    def _show_waiting(self) -> None:
        if self._status is None:
            return
        if self._waiting:
            self._status.update(", ".join(f"{state} {name}" for name, state in self._waiting.items()))
            self._status.start()
        else:
            self._status.stop()
