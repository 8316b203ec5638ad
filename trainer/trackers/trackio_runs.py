"""Trackio, in its folder on this machine (TRACKIO_DIR); `trackio show` opens it."""

from typing import Any

import trackio

from trainer.trackers.scalars import evaluation_scalars, update_scalars
from trainer.tracking import Evaluation, UpdateMetrics


class TrackioTracker:
    def __init__(self, *, project: str, run_id: str, configuration: dict[str, Any]) -> None:
        """Continues the run of the same name."""
        self._run = trackio.init(
            project=project, name=run_id, config=configuration, resume="allow", embed=False, auto_log_gpu=False, auto_log_cpu=False
        )

    def update(self, metrics: UpdateMetrics) -> None:
        self._run.log(update_scalars(metrics), step=metrics.version)

    def evaluation(self, evaluation: Evaluation) -> None:
        self._run.log(evaluation_scalars(evaluation), step=evaluation.version)

    def close(self) -> None:
        self._run.finish()
