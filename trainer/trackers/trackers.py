"""The trackers of a run, together."""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from shared.configuration import Configuration, without_secrets
from shared.errors import ConfigurationError
from trainer.trackers.console import ConsoleTracker
from trainer.trackers.guarded import BackgroundTracker, GuardedTracker
from trainer.tracking import Evaluation, Tracker, UpdateMetrics

PACKAGE_BY_TRACKER: Mapping[str, str] = {"tensorboard": "tensorboard", "wandb": "wandb", "trackio": "trackio"}
"""Those of packages that a plain installation lacks."""


class Trackers:
    """Tells everyone that a run chose; the console also what happens between two updates."""

    def __init__(self, console: ConsoleTracker, others: Sequence[GuardedTracker]) -> None:
        self._console = console
        self._others = others
        self._stack = ExitStack()

    def __enter__(self) -> "Trackers":
        self._stack.enter_context(self._console)
        for other in self._others:
            self._stack.callback(other.close)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    @property
    def failures(self) -> int:
        return sum(other.failures for other in self._others)

    def waiting(self, version: int, ready: int, needed: int) -> None:
        self._console.waiting(version, ready, needed)

    def training(self, version: int) -> None:
        self._console.training(version)

    def note(self, text: str) -> None:
        self._console.note(text)

    def update(self, metrics: UpdateMetrics) -> None:
        self._console.update(metrics)
        for other in self._others:
            other.update(metrics)

    def evaluation(self, evaluation: Evaluation) -> None:
        for other in self._others:
            other.evaluation(evaluation)


def require_packages(names: Sequence[str]) -> None:
    """Raises: ConfigurationError that tells what to install if a tracker's package is missing."""
    for name in names:
        package = PACKAGE_BY_TRACKER.get(name)
        if package and importlib.util.find_spec(package) is None:
            raise ConfigurationError(
                f"trainer.trackers has {name!r}, which needs the package {package}, and it is not installed; "
                f"run `pip install {package}`, or take {name!r} out"
            )


def open_trackers(configuration: Configuration, *, version: int) -> Trackers:
    """Args: version: resumed from."""
    chosen = configuration.trainer.trackers
    console = ConsoleTracker(configuration.trainer.num_updates, shows_updates="console" in chosen)
    openers = _openers(configuration, version)
    others = [
        (BackgroundTracker if name in PACKAGE_BY_TRACKER else GuardedTracker)(name, openers[name], notice=console.note)
        for name in chosen
        if name in openers
    ]
    return Trackers(console, others)


def _openers(configuration: Configuration, version: int) -> dict[str, Callable[[], Tracker]]:
    """How each tracker but the console is opened; its package is imported only then."""
    directory = Path(configuration.run.directory)
    project, run_id = configuration.trainer.tracker_project, configuration.run.id
    settings: dict[str, Any] = msgspec.to_builtins(without_secrets(configuration))

    def jsonl() -> Tracker:
        from trainer.trackers.jsonl import JsonlTracker

        return JsonlTracker(directory)

    def tensorboard() -> Tracker:
        from trainer.trackers.tensorboard import TensorBoardTracker

        return TensorBoardTracker(directory, version=version)

    def wandb() -> Tracker:
        from trainer.trackers.weights_and_biases import WandbTracker

        return WandbTracker(directory, project=project, run_id=run_id, configuration=settings)

    def trackio() -> Tracker:
        from trainer.trackers.trackio_runs import TrackioTracker

        return TrackioTracker(project=project, run_id=run_id, configuration=settings)

    def prometheus() -> Tracker:
        from trainer.trackers.prometheus import PrometheusTracker

        return PrometheusTracker(host=configuration.trainer.prometheus_host, port=configuration.trainer.prometheus_port)

    return {"jsonl": jsonl, "prometheus": prometheus, "tensorboard": tensorboard, "wandb": wandb, "trackio": trackio}
