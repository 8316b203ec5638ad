"""Bars for what a command waits for: first the processes that it starts, then what they do."""

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class ProgressDisplay:
    """Bars on a terminal, lines elsewhere. A subclass is the observer of a run's processes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        columns = (
            TextColumn("{task.description:<22}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[detail]}"),
        )
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal)
        self._set_up = self._progress.add_task("starting processes", total=0, detail="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._progress.stop()

    def restarts(self, name: str, ending: str, delay_s: float) -> None:
        self._console.print(f"{name} {ending}; it is started again in {delay_s:g} s")

    def _starting(self, name: str) -> None:
        task = self._progress.tasks[self._set_up]
        self._progress.update(self._set_up, total=(task.total or 0) + 1, detail=name)

    def _started(self, words: str) -> None:
        self._progress.update(self._set_up, advance=1, detail="")
        self._say_elsewhere(words)

    def _say_elsewhere(self, words: str) -> None:
        """Says what the bars say, where there are none."""
        if not self._console.is_terminal:
            self._console.print(words)
