"""What the demo shows while it runs: bars on a terminal, a line for each event elsewhere."""

from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from services.standalone import run_files
from services.standalone.run_files import Evaluation, Update
from services.standalone.supervisor import State


class DemoDisplay:
    """The observer of the demo's run. What the trainer prints is its cue to read the run's files again."""

    def __init__(self, console: Console, directory: Path, *, num_updates: int) -> None:
        self._console = console
        self._directory = directory
        columns = (
            TextColumn("{task.description:<22}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[detail]}"),
        )
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal)
        self._set_up = self._progress.add_task("starting processes", total=0, detail="")
        self._training: TaskID | None = None
        self._num_updates = num_updates
        self._num_updates_shown = 0
        self._num_evaluations_shown = {False: 0, True: 0}

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._progress.stop()

    def state_changed(self, name: str, state: State, seconds: float) -> None:
        if state is State.STARTING:
            self._starting(name)
        elif state is State.READY:
            self._started(f"{name} is ready after {seconds:.1f} s")
        elif state is State.RUNNING:
            self._started(f"{name} has started")
            self._training = self._progress.add_task("training", total=self._num_updates, detail="first evaluation")

    def line_written(self, name: str, line: str) -> None:
        if name == "trainer":
            self._show_progress()

    def _starting(self, name: str) -> None:
        task = self._progress.tasks[self._set_up]
        self._progress.update(self._set_up, total=(task.total or 0) + 1, detail=name)

    def _started(self, words: str) -> None:
        self._progress.update(self._set_up, advance=1, detail="")
        self._say_elsewhere(words)

    def _show_progress(self) -> None:
        for greedy in (False, True):
            evaluations = run_files.evaluations(self._directory, greedy=greedy)
            for evaluation in evaluations[self._num_evaluations_shown[greedy] :]:
                self._console.print(_evaluation_words(evaluation))
            self._num_evaluations_shown[greedy] = len(evaluations)
        updates = run_files.updates(self._directory)
        for update in updates[self._num_updates_shown :]:
            words = _update_words(update)
            if self._training is not None:
                self._progress.update(self._training, completed=update.version, detail=words)
            self._say_elsewhere(f"update {update.version}/{self._num_updates}: {words}")
        self._num_updates_shown = len(updates)

    def _say_elsewhere(self, words: str) -> None:
        """Says what the bars say, where there are none."""
        if not self._console.is_terminal:
            self._console.print(words)


def _evaluation_words(evaluation: Evaluation) -> str:
    how = "greedy" if evaluation.greedy else "sampled"
    return f"unseen tasks after update {evaluation.version}: success {evaluation.success_rate:.3f} {how}"


def _update_words(update: Update) -> str:
    return f"success {update.success_rate:.2f}, reward {update.reward_mean:.2f}, lag {update.lag_max}"
