"""What answered calls cost and brought, by engine and environment; kept in plain numbers and turned into metrics when scraped.

prometheus_client's own counters take a lock and a look-up each, which on the hot path would cost as much as parsing the request.
"""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

ENGINE_BUCKETS_S: Final = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1_000, 3_000)
ADDED_BUCKETS_S: Final = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.03, 0.1, 1)
MAX_ENVIRONMENTS: Final = 256
OTHER: Final = "other"
"""Environments beyond so many are counted together: callers choose the names."""


class Distribution:
    """A histogram with fixed upper bounds."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    @property
    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound, values at most as high), as Prometheus wants it."""
        total, buckets = 0, []
        for bound, count in zip([*map(float, self._bounds), float("inf")], self._counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else str(bound), float(total)))
        return buckets

    @property
    def sum(self) -> float:
        return self._sum


@dataclass(slots=True)
class Totals:
    completed_calls: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    sampled_tokens: int = 0
    seconds: Distribution = field(default_factory=lambda: Distribution(ENGINE_BUCKETS_S))


class CallStatistics(Collector):
    """Of calls that one attempt or more answered with 200."""

    def __init__(self) -> None:
        self._totals: dict[tuple[str, str], Totals] = {}
        self._environments: set[str] = set()
        self._added = Distribution(ADDED_BUCKETS_S)

    def answered(
        self, engine_id: str, environment: str, *, prompt_tokens: int, cached_tokens: int, output_tokens: int, engine_s: float
    ) -> None:
        """Args: engine_s: of the attempt that completed the call, from the request sent to the whole answer."""
        totals = self._totals.get((engine_id, environment)) or self._new(engine_id, environment)
        totals.completed_calls += 1
        totals.prompt_tokens += prompt_tokens
        totals.cached_tokens += cached_tokens
        totals.sampled_tokens += output_tokens
        totals.seconds.add(engine_s)

    def added(self, seconds: float) -> None:
        """What a call took beyond waiting and the engines."""
        self._added.add(seconds)

    def forget(self, engine_id: str) -> None:
        """The engine is gone, and its address may never come back."""
        for key in [key for key in self._totals if key[0] == engine_id]:
            del self._totals[key]

    def collect(self) -> Iterable[CounterMetricFamily | HistogramMetricFamily]:
        labels = ["engine", "environment"]
        for name, text in (
            ("completed_calls", "Generate calls an engine completed."),
            ("prompt_tokens", "Tokens of their prompts."),
            ("cached_tokens", "Of these, found in the engine's prefix cache."),
            ("sampled_tokens", "Tokens the engine sampled in the attempts that completed them."),
        ):
            family = CounterMetricFamily(f"headrace_hub_{name}", text, labels=labels)
            for key, totals in self._totals.items():
                family.add_metric(key, getattr(totals, name))
            yield family
        seconds = HistogramMetricFamily(
            "headrace_hub_engine_seconds", "From a request sent to an engine to its whole answer, in seconds.", labels=labels
        )
        for key, totals in self._totals.items():
            seconds.add_metric(key, totals.seconds.cumulative, totals.seconds.sum)
        yield seconds
        added = HistogramMetricFamily(
            "headrace_hub_added_seconds", "What a call took in the hub beyond waiting for and in engines, in seconds."
        )
        added.add_metric([], self._added.cumulative, self._added.sum)
        yield added

    def _new(self, engine_id: str, environment: str) -> Totals:
        if environment not in self._environments:
            if len(self._environments) >= MAX_ENVIRONMENTS:
                environment = OTHER
            self._environments.add(environment)
        return self._totals.setdefault((engine_id, environment), Totals())
