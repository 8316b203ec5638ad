"""metrics.jsonl in the run directory: every update whole, for programs to read."""

from pathlib import Path

from trainer.tracking import Evaluation, JsonLines, UpdateMetrics


class JsonlTracker:
    """Evaluations have a file of their own in any case (trainer/evaluation.py)."""

    def __init__(self, directory: Path) -> None:
        self._lines = JsonLines(directory / "metrics.jsonl")

    def update(self, metrics: UpdateMetrics) -> None:
        self._lines.append(metrics)

    def evaluation(self, evaluation: Evaluation) -> None:
        pass

    def close(self) -> None:
        pass
