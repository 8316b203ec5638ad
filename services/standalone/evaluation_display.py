"""What `headrace evaluate` shows while it works: bars on a terminal, a line now and then elsewhere."""

from collections import Counter
from collections.abc import Mapping

from rich.console import Console
from rich.progress import TaskID

from services.standalone.observer import State
from services.standalone.progress_display import ProgressDisplay
from shared.trajectory import SUCCESS_REWARD, Trajectory

NUM_LINES = 10
"""Lines of progress for each environment, where there are no bars."""


class EvaluationDisplay(ProgressDisplay):
    """The observer of an evaluation's processes, told of each episode that has ended."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._bar_by_name: dict[str, TaskID] = {}
        self._total_by_name: Mapping[str, int] = {}
        self._num_ended: Counter[str] = Counter()
        self._num_successes: Counter[str] = Counter()

    def state_changed(self, name: str, state: State, seconds: float) -> None:
        if state is State.STARTING:
            self._starting(name)
        elif state is State.READY:
            self._started(f"{name} is ready after {seconds:.1f} s")

    def line_written(self, name: str, line: str) -> None:
        """Output is in the logs."""

    def planned(self, num_episodes: Mapping[str, int]) -> None:
        """By environment; before any has ended."""
        self._total_by_name = num_episodes
        self._bar_by_name = {name: self._progress.add_task(name, total=total, detail="") for name, total in num_episodes.items()}

    def ended(self, trajectory: Trajectory) -> None:
        name = trajectory.environment
        self._num_ended[name] += 1
        self._num_successes[name] += trajectory.reward >= SUCCESS_REWARD
        done, total = self._num_ended[name], self._total_by_name[name]
        words = f"success {self._num_successes[name] / done:.1%}"
        self._progress.update(self._bar_by_name[name], completed=done, detail=words)
        if done * NUM_LINES // total > (done - 1) * NUM_LINES // total:
            self._say_elsewhere(f"{name}: {done} of {total} episodes, {words}")
