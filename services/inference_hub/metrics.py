"""Every metric of the hub, with unit and description. Served by `GET /metrics`."""

from collections.abc import Iterable, Sized
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.inference_hub.call_statistics import CALL_BUCKETS_S, CallStatistics
from services.inference_hub.engines import EngineRegistry, EngineState
from services.inference_hub.gate import Gate
from shared.loop_lag import LAG_BUCKETS_S

STEP_BUCKETS_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Metrics:
    """The metrics the hub counts as it works, plus those read off the registry when somebody asks."""

    def __init__(self, registry: EngineRegistry, gate: Gate, waiting: Sized) -> None:
        """Args: waiting: the calls that wait for an engine."""
        self.collectors = CollectorRegistry()
        into = self.collectors
        self.calls = Counter("headrace_hub_generate_calls", "Generate calls answered, by HTTP status.", ["status"], registry=into)
        self.abandoned_calls = Counter("headrace_hub_generate_abandoned", "Generate calls whose caller left.", registry=into)
        self.call_seconds = Histogram(
            "headrace_hub_generate_seconds",
            "Time from a generate call's arrival to its answer, in seconds.",
            buckets=CALL_BUCKETS_S,
            registry=into,
        )
        self.output_tokens = Counter("headrace_hub_output_tokens", "Tokens in answers to callers.", registry=into)
        self.resumed_tokens = Counter(
            "headrace_hub_resumed_tokens",
            "Tokens kept from partial answers, which another attempt went on from.",
            registry=into,
        )
        self.probe_failures = Counter("headrace_hub_probe_failures", "Probes an engine did not answer.", registry=into)
        self.weight_updates = Counter(
            "headrace_hub_weight_updates", "Weight updates that ended, by outcome.", ["outcome"], registry=into
        )
        self.checksum_mismatches = Counter(
            "headrace_hub_checksum_mismatches", "Engines whose weights were not what the trainer sent.", registry=into
        )
        self.weight_update_seconds = Histogram(
            "headrace_hub_weight_update_seconds",
            "Seconds of a committed weight update, by step: pause_call, load, verify, resume; pause: without generation.",
            ["step"],
            buckets=STEP_BUCKETS_S,
            registry=into,
        )
        self.loop_lag = Histogram(
            "headrace_hub_loop_lag_seconds",
            "Seconds by which the event loop is late, looked at ten times a second.",
            buckets=LAG_BUCKETS_S,
            registry=into,
        )
        self.tasks = Gauge("headrace_hub_tasks", "Tasks of the event loop, when it was asked.", registry=into)
        self.by_engine = CallStatistics()
        into.register(self.by_engine)
        into.register(_RegistryCollector(registry, gate, waiting))


class _RegistryCollector(Collector):
    """What is read off the registry when it is scraped, so that the hot path does not keep it."""

    def __init__(self, registry: EngineRegistry, gate: Gate, waiting: Sized) -> None:
        self._registry = registry
        self._gate = gate
        self._waiting = waiting

    def collect(self) -> Iterable[Metric]:
        states = GaugeMetricFamily("headrace_hub_engines", "Registered engines, by state.", labels=["state"])
        engine_states = [self._registry.state_of(engine) for engine in self._registry.by_id.values()]
        for state in EngineState:
            states.add_metric([state], engine_states.count(state))
        yield states
        calls = GaugeMetricFamily("headrace_hub_engine_calls", "Generate calls an engine is answering.", labels=["engine"])
        tokens = GaugeMetricFamily(
            "headrace_hub_engine_outstanding_tokens",
            "Tokens an engine has to prefill and sample for its calls.",
            labels=["engine"],
        )
        for engine in self._registry.by_id.values():
            calls.add_metric([engine.id], engine.num_outstanding_calls)
            tokens.add_metric([engine.id], engine.outstanding_tokens)
        yield calls
        yield tokens
        yield from self._usage()
        yield GaugeMetricFamily("headrace_hub_waiting_calls", "Generate calls that wait for an engine.", value=len(self._waiting))
        yield GaugeMetricFamily(
            "headrace_hub_held_calls",
            "Of these, waiting while no engine may take calls.",
            value=0 if self._gate.is_open else len(self._waiting),
        )
        yield GaugeMetricFamily(
            "headrace_hub_policy_version", "The policy version in force.", value=self._registry.in_force.version
        )

    def _usage(self) -> Iterable[Metric]:
        ready = CounterMetricFamily(
            "headrace_hub_engine_ready_seconds",
            "Seconds in which an engine was ready for calls; not while a weight update holds it.",
            labels=["engine"],
        )
        idle = CounterMetricFamily(
            "headrace_hub_engine_idle_seconds", "Of these, seconds in which it had no call of this hub.", labels=["engine"]
        )
        used = CounterMetricFamily(
            "headrace_hub_engine_used_seconds",
            "Seconds of ready time, each weighted by the share of the engine's limits that its calls used.",
            labels=["engine"],
        )
        max_calls = GaugeMetricFamily(
            "headrace_hub_engine_max_running_calls", "Calls an engine can run at the same time.", labels=["engine"]
        )
        max_tokens = GaugeMetricFamily("headrace_hub_engine_max_tokens", "Tokens an engine's KV cache holds.", labels=["engine"])
        for engine in self._registry.by_id.values():
            usage = engine.usage.read()
            ready.add_metric([engine.id], usage.ready_s)
            idle.add_metric([engine.id], usage.idle_s)
            used.add_metric([engine.id], usage.used_s)
            if engine.limits.calls is not None:
                max_calls.add_metric([engine.id], engine.limits.calls)
            if engine.limits.tokens is not None:
                max_tokens.add_metric([engine.id], engine.limits.tokens)
        yield from (ready, idle, used, max_calls, max_tokens)
