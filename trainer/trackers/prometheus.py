"""The last update's numbers for Prometheus to scrape, at `trainer.prometheus_port`."""

from prometheus_client import CollectorRegistry, Gauge, start_http_server

from trainer.trackers.scalars import evaluation_scalars, update_scalars
from trainer.tracking import Evaluation, UpdateMetrics


class PrometheusTracker:
    """Two gauges, labelled by the flat names that the other trackers use: headrace_trainer{metric="train/loss"}."""

    def __init__(self, *, host: str, port: int) -> None:
        """Raises: OSError if the port is taken."""
        registry = CollectorRegistry()
        meaning = "A number of the newest update, by its name in docs/metrics.md"
        self._metrics = Gauge("headrace_trainer", meaning, ["metric"], registry=registry)
        self._version = Gauge("headrace_trainer_version", "Policy version that the newest update made", registry=registry)
        self._server, self._thread = start_http_server(port, host, registry=registry)

    @property
    def port(self) -> int:
        """What the system chose, where the setting is 0."""
        return self._server.server_port

    def update(self, metrics: UpdateMetrics) -> None:
        self._version.set(metrics.version)
        self._set(update_scalars(metrics))

    def evaluation(self, evaluation: Evaluation) -> None:
        self._set(evaluation_scalars(evaluation))

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _set(self, scalars: dict[str, float]) -> None:
        for name, value in scalars.items():
            self._metrics.labels(name).set(value)
