"""What the demo shows while it runs: bars on a terminal, a line for each event elsewhere."""

from pathlib import Path

from rich.console import Console
from rich.progress import TaskID

from services.standalone import run_files
from services.standalone.observer import State
from services.standalone.progress_display import ProgressDisplay
from services.standalone.run_files import Evaluation, Update


class DemoDisplay(ProgressDisplay):
    """The observer of the demo's run. What the trainer prints is its cue to read the run's files again."""

    def __init__(self, console: Console, directory: Path, *, num_updates: int) -> None:
        super().__init__(console)
        self._directory = directory
        self._training: TaskID | None = None
        self._num_updates = num_updates
        self._num_updates_shown = 0
        self._num_evaluations_shown = {False: 0, True: 0}

    def state_changed(self, name: str, state: State, seconds: float) -> None:
        if state is State.STARTING:
            self._starting(name)
        elif state is State.READY:
            self._started(f"{name} is ready after {seconds:.1f} s")
        elif state is State.RUNNING:
            self._started(f"{name} has started")
            if self._training is None:  # Or it was started again, and goes on.
                self._training = self._progress.add_task("training", total=self._num_updates, detail="first evaluation")

    def line_written(self, name: str, line: str) -> None:
        if name == "trainer":
            self._show_progress()

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


def _evaluation_words(evaluation: Evaluation) -> str:
    how = "greedy" if evaluation.greedy else "sampled"
    return f"unseen tasks after update {evaluation.version}: success {evaluation.success_rate:.3f} {how}"


def _update_words(update: Update) -> str:
    return f"success {update.success_rate:.2f}, reward {update.reward_mean:.2f}, lag {update.lag_max}"
