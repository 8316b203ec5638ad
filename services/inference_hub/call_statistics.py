"""What answered calls cost and brought, by engine and environment; kept in plain numbers and turned into metrics when scraped.

prometheus_client's own counters take a lock and a look-up each, which on the hot path would cost as much as parsing the request.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

ENGINE_BUCKETS_S: Final = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1_000, 3_000)
CALL_BUCKETS_S: Final = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
ADDED_BUCKETS_S: Final = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.03, 0.1, 1)
MAX_ENVIRONMENTS: Final = 256
OTHER: Final = "other"
"""Environments beyond so many are counted together: callers choose the names."""


class Distribution:
    """A histogram with fixed upper bounds."""

    __slots__ = ("_bounds", "_counts", "_sum")

    @classmethod
    def of_calls(cls) -> "Distribution":
        return cls(CALL_BUCKETS_S)

    @classmethod
    def of_attempts(cls) -> "Distribution":
        return cls(ENGINE_BUCKETS_S)

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
    seconds: Distribution = field(default_factory=Distribution.of_attempts)
    first_token_seconds: Distribution = field(default_factory=Distribution.of_attempts)


@dataclass(slots=True)
class Waits:
    """Of one environment's calls."""

    held: Distribution = field(default_factory=Distribution.of_calls)
    queued: Distribution = field(default_factory=Distribution.of_calls)


class CallStatistics(Collector):
    """Of calls that were answered with 200, of what they waited for, and of attempts that did not complete them."""

    def __init__(self) -> None:
        self._totals: dict[tuple[str, str], Totals] = {}
        self._waits: dict[str, Waits] = {}
        self._failures: Counter[tuple[str, str, str]] = Counter()
        self._environments: set[str] = set()
        self._added = Distribution(ADDED_BUCKETS_S)

    def answered(
        self,
        engine_id: str,
        environment: str,
        *,
        prompt_tokens: int,
        cached_tokens: int,
        output_tokens: int,
        engine_s: float,
        first_token_s: float | None = None,
    ) -> None:
        """Args: engine_s: of the attempt that completed the call, from the request sent to the whole answer. first_token_s: of
        that, until the first token, by the engine's own clock."""
        totals = self._totals.get((engine_id, environment)) or self._new(engine_id, environment)
        totals.completed_calls += 1
        totals.prompt_tokens += prompt_tokens
        totals.cached_tokens += cached_tokens
        totals.sampled_tokens += output_tokens
        totals.seconds.add(engine_s)
        if first_token_s is not None:
            totals.first_token_seconds.add(first_token_s)

    def failed(self, engine_id: str, environment: str, reason: str) -> None:
        """An attempt did not complete its call."""
        self._failures[engine_id, self._label(environment), reason] += 1

    def waited(self, environment: str, *, held_s: float, queued_s: float) -> None:
        """A call waited. Args: held_s: while no engine might take calls. queued_s: for a place, beyond that."""
        waits = self._waits.setdefault(self._label(environment), Waits())
        if held_s:
            waits.held.add(held_s)
        waits.queued.add(queued_s)

    def added(self, seconds: float) -> None:
        """What a call took beyond waiting and the engines."""
        self._added.add(seconds)

    def forget(self, engine_id: str) -> None:
        """The engine is gone, and its address may never come back."""
        for counted in (self._totals, self._failures):
            for key in [key for key in counted if key[0] == engine_id]:
                del counted[key]  # type: ignore[arg-type]

    def collect(self) -> Iterable[Metric]:
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
        yield _histogram(
            "engine_seconds",
            "From a request sent to an engine to its whole answer, in seconds.",
            labels,
            {key: totals.seconds for key, totals in self._totals.items()},
        )
        yield _histogram(
            "first_token_seconds",
            "From a request's arrival at an engine to its first token, in seconds, as engines with --enable-metrics report it.",
            labels,
            {key: totals.first_token_seconds for key, totals in self._totals.items()},
        )
        yield _histogram(
            "hold_seconds",
            "Time a generate call waited while no engine might take calls, in seconds; calls that were not held are not counted.",
            ["environment"],
            {(environment,): waits.held for environment, waits in self._waits.items()},
        )
        yield _histogram(
            "queue_seconds",
            "Time a generate call waited for a place in an engine, in seconds; calls that found one at once are not counted.",
            ["environment"],
            {(environment,): waits.queued for environment, waits in self._waits.items()},
        )
        failures = CounterMetricFamily(
            "headrace_hub_attempt_failures", "Attempts that did not complete a call, by reason.", labels=[*labels, "reason"]
        )
        for failure, number in self._failures.items():
            failures.add_metric(failure, number)
        yield failures
        yield _histogram(
            "added_seconds", "What a call took in the hub beyond waiting for and in engines, in seconds.", [], {(): self._added}
        )

    def _new(self, engine_id: str, environment: str) -> Totals:
        return self._totals.setdefault((engine_id, self._label(environment)), Totals())

    def _label(self, environment: str) -> str:
        if environment not in self._environments:
            if len(self._environments) >= MAX_ENVIRONMENTS:
                environment = OTHER
            self._environments.add(environment)
        return environment


def _histogram(
    name: str, text: str, labels: Sequence[str], distributions: Mapping[tuple[str, ...], Distribution]
) -> HistogramMetricFamily:
    family = HistogramMetricFamily(f"headrace_hub_{name}", text, labels=labels)
    for values, distribution in distributions.items():
        family.add_metric(values, distribution.cumulative, distribution.sum)
    return family
