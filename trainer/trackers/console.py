"""What one watches while training runs."""

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from trainer.tracking import UpdateMetrics


class ConsoleTracker:
    """A line an update, and in a terminal a bar below them, with the time that is left and what is awaited."""

    def __init__(self, num_updates: int, *, shows_updates: bool = True, console: Console | None = None) -> None:
        """Args: shows_updates: False prints notes alone."""
        self._num_updates = num_updates
        self._shows_updates = shows_updates
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._progress: Progress | None = None
        if self._console.is_terminal and shows_updates:
            columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
            self._progress = Progress(*columns, console=self._console)
            self._task = self._progress.add_task("", total=num_updates)

    def __enter__(self) -> "ConsoleTracker":
        if self._progress:
            self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._progress:
            self._progress.stop()

    def waiting(self, version: int, ready: int, needed: int) -> None:
        self._say(version, f"waiting for rollouts, {ready} of {needed} groups")

    def training(self, version: int) -> None:
        self._say(version, "training")

    def update(self, metrics: UpdateMetrics) -> None:
        if self._shows_updates:
            self._console.print(summary(metrics, self._num_updates))
        self._say(metrics.version, "")

    def note(self, text: str) -> None:
        self._console.print(text, markup=False)

    def _say(self, version: int, text: str) -> None:
        if self._progress:
            self._progress.update(self._task, completed=version, description=text)


def summary(metrics: UpdateMetrics, num_updates: int) -> str:
    """One update in one line."""
    return (
        f"update {metrics.update}/{num_updates}  reward {metrics.reward_mean:.3f}  success {metrics.success_rate:.2f}  "
        f"lag {metrics.lag_max}  wait {metrics.wait_prev_gen_s:.1f} s  train {metrics.train_s:.1f} s  "
        f"push {metrics.weight_sync_s:.2f} s (paused {1000 * metrics.weight_pause_s:.0f} ms)  kl {metrics.kl_behaviour:.4f}  "
        f"clipped {metrics.clip_fraction:.1%}"
    )
