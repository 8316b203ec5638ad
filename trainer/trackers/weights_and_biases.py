"""Weights & Biases. Its own environment variables decide where and as whom: WANDB_API_KEY, WANDB_MODE=offline, WANDB_ENTITY."""

from pathlib import Path
from typing import Any

import wandb

from trainer.trackers.scalars import evaluation_scalars, update_scalars
from trainer.tracking import Evaluation, UpdateMetrics


class WandbTracker:
    def __init__(self, directory: Path, *, project: str, run_id: str, configuration: dict[str, Any]) -> None:
        """Continues the run of the same id."""
        self._run = wandb.init(
            project=project,
            id=run_id,
            name=run_id,
            resume="allow",
            dir=directory,
            config=configuration,
            settings=wandb.Settings(console="off", silent=True),
        )
        # Its own step only rises, and a resumed run's version goes back.
        self._run.define_metric("version")
        self._run.define_metric("*", step_metric="version")

    def update(self, metrics: UpdateMetrics) -> None:
        self._run.log({**update_scalars(metrics), "version": metrics.version})

    def evaluation(self, evaluation: Evaluation) -> None:
        self._run.log({**evaluation_scalars(evaluation), "version": evaluation.version})

    def close(self) -> None:
        self._run.finish()
