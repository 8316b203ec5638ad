"""Event files in `tensorboard/` of the run directory."""

from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from trainer.trackers.scalars import evaluation_scalars, update_scalars
from trainer.tracking import Evaluation, UpdateMetrics


class TensorBoardTracker:
    def __init__(self, directory: Path, *, version: int) -> None:
        """Args: version: resumed from; what a lineage that was cut off wrote of later ones is hidden."""
        self._writer = SummaryWriter(str(directory / "tensorboard"), purge_step=version + 1)

    def update(self, metrics: UpdateMetrics) -> None:
        self._write(update_scalars(metrics), metrics.version)

    def evaluation(self, evaluation: Evaluation) -> None:
        self._write(evaluation_scalars(evaluation), evaluation.version)

    def close(self) -> None:
        self._writer.close()

    def _write(self, scalars: dict[str, float], version: int) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, version)
        self._writer.flush()
