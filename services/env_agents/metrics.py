"""Every metric of an agent process, with unit and meaning."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from shared.loop_lag import LAG_BUCKETS_S
from shared.trajectory import Trajectory

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3000)
_TOKENS = (16, 64, 256, 1024, 4096, 16384, 65536)


class AgentMetrics:
    """Metrics in a registry of their own, so that two agent processes may live in one test."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.groups_admitted = self._counter("groups_admitted", "Groups started by this process", "environment")
        self.groups_adopted = self._counter("groups_adopted", "Groups taken over from a process that stopped renewing its lease")
        self.groups_cancelled = self._counter(
            "groups_cancelled", "Groups whose remaining episodes this process cancelled, by why they were not needed", "reason"
        )
        self.cancelled_tokens = self._counter(
            "cancelled_tokens", "Tokens in finished turns of cancelled episodes, by why they were not needed", "reason"
        )
        self.admissions_refused = self._counter("admissions_refused", "Times the asynchronous ratio allowed no further group")
        self.redis_failures = self._counter("redis_failures", "Calls to Redis that failed and were or will be repeated")
        self.episodes_in_flight = Gauge(
            "headrace_agents_episodes_in_flight", "Episodes that run in this process", registry=self._registry
        )
        self.loop_lag = Histogram(
            "headrace_agents_loop_lag_seconds",
            "By how much the event loop is late, looked at ten times a second",
            buckets=LAG_BUCKETS_S,
            registry=self._registry,
        )
        self.tasks = Gauge("headrace_agents_tasks", "Tasks of the event loop, when it was asked", registry=self._registry)
        self._episodes = self._counter("episodes", "Episodes finished", "environment", "outcome", "receipt")
        self._sampled_tokens = self._counter("sampled_tokens", "Tokens sampled by the policy in finished episodes", "environment")
        self._tool_calls = self._counter("tool_calls", "Tool calls in finished episodes", "environment", "is_error")
        self._episode_tokens = self._histogram("episode_tokens", "Tokens of a finished episode", _TOKENS, "environment")
        self._seconds = self._histogram(
            "episode_seconds", "Seconds of a finished episode by where they went", _SECONDS, "environment", "part"
        )

    def count_episode(self, trajectory: Trajectory, receipt: str) -> None:
        """One finished episode."""
        name, timings = trajectory.environment, trajectory.timings
        self._episodes.labels(name, trajectory.outcome, receipt).inc()
        self._sampled_tokens.labels(name).inc(trajectory.num_sampled_tokens)
        self._episode_tokens.labels(name).observe(trajectory.num_tokens)
        for call in (call for turn in trajectory.turns for call in turn.tool_calls):
            self._tool_calls.labels(name, str(call.is_error).lower()).inc()
        self._seconds.labels(name, "queued").observe(timings.queued_s)
        self._seconds.labels(name, "generating").observe(timings.generating_s)
        self._seconds.labels(name, "environment").observe(timings.environment_s)
        self._seconds.labels(name, "reward").observe(timings.reward_s)

    def exposition(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self._registry)

    def _counter(self, name: str, meaning: str, *labels: str) -> Counter:
        return Counter(f"headrace_agents_{name}", meaning, labels, registry=self._registry)

    def _histogram(self, name: str, meaning: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(f"headrace_agents_{name}", meaning, labels, buckets=buckets, registry=self._registry)
