"""Trackers that may fail, hang or be away, without training noticing."""

import queue
import threading
from collections.abc import Callable
from typing import Final

from trainer.tracking import Evaluation, Tracker, UpdateMetrics

MAX_WAITING: Final = 256
"""Lines that a slow tracker may be behind; what comes then is lost to it."""
CLOSE_TIMEOUT_S: Final = 60.0
"""For what a tracker has still to send when training ends; a checkpoint is on disk by then."""

Work = Callable[[Tracker], None]


class GuardedTracker:
    """Another tracker, opened when it is first needed. What it fails at is counted, and said the first time."""

    def __init__(self, name: str, open_tracker: Callable[[], Tracker], *, notice: Callable[[str], None]) -> None:
        self._name = name
        self._open = open_tracker
        self._notice = notice
        self._tracker: Tracker | None = None
        self.failures = 0

    def update(self, metrics: UpdateMetrics) -> None:
        self._do(lambda tracker: tracker.update(metrics))

    def evaluation(self, evaluation: Evaluation) -> None:
        self._do(lambda tracker: tracker.evaluation(evaluation))

    def close(self) -> None:
        if self._tracker is not None:
            self._do(lambda tracker: tracker.close())

    def _do(self, work: Work) -> None:
        # Whatever a tracker raises is data here: training goes on.
        try:
            self._tracker = self._tracker or self._open()
            work(self._tracker)
        except Exception as error:
            self._count(f"{type(error).__name__}: {error}")

    def _count(self, problem: str) -> None:
        self.failures += 1
        if self.failures == 1:
            self._notice(
                f"trainer.trackers: {self._name} failed, and training goes on without it: {problem}; further failures are only "
                "counted (tracker_failures)"
            )


class BackgroundTracker(GuardedTracker):
    """One that may need the network, in a thread of its own, opened there too. Notices come from the thread."""

    def __init__(self, name: str, open_tracker: Callable[[], Tracker], *, notice: Callable[[str], None]) -> None:
        super().__init__(name, open_tracker, notice=notice)
        self._waiting: queue.Queue[Work | None] = queue.Queue(MAX_WAITING)
        # A daemon, so that a tracker that hangs does not keep the process alive.
        self._thread = threading.Thread(target=self._run, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Lets it write what it has, for a while."""
        try:
            self._waiting.put(None, timeout=CLOSE_TIMEOUT_S)
            self._thread.join(CLOSE_TIMEOUT_S)
        except queue.Full:
            pass
        if self._thread.is_alive():
            self._count(f"it did not end within {CLOSE_TIMEOUT_S:g} s")

    def _do(self, work: Work) -> None:
        try:
            self._waiting.put_nowait(work)
        except queue.Full:
            self._count("it is slower than training")

    def _run(self) -> None:
        while (work := self._waiting.get()) is not None:
            super()._do(work)
        if self._tracker is not None:
            super()._do(lambda tracker: tracker.close())
