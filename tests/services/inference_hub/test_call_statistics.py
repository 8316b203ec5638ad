from prometheus_client import CollectorRegistry

from services.inference_hub.call_statistics import MAX_ENVIRONMENTS, OTHER, CallStatistics


def collected(statistics: CallStatistics) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(statistics)
    return registry


def test_calls_are_counted_by_engine_and_environment():
    statistics = CallStatistics()
    for environment, cached, seconds in (("a", 0, 0.02), ("a", 60, 0.2), ("b", 5, 2.0)):
        statistics.answered("e", environment, prompt_tokens=100, cached_tokens=cached, output_tokens=7, engine_s=seconds)
    registry = collected(statistics)
    labels = {"engine": "e", "environment": "a"}
    names = ("completed_calls", "prompt_tokens", "cached_tokens", "sampled_tokens")
    assert [registry.get_sample_value(f"headrace_hub_{name}_total", labels) for name in names] == [2, 200, 60, 14]
    buckets = [
        registry.get_sample_value("headrace_hub_engine_seconds_bucket", labels | {"le": le})
        for le in ("0.01", "0.03", "0.3", "+Inf")
    ]
    assert buckets == [0, 1, 2, 2]
    assert registry.get_sample_value("headrace_hub_engine_seconds_count", labels) == 2
    assert registry.get_sample_value("headrace_hub_completed_calls_total", {"engine": "e", "environment": "b"}) == 1


def test_waits_are_counted_by_environment_and_those_of_no_gate_are_not_held():
    statistics = CallStatistics()
    statistics.waited("a", held_s=2.0, queued_s=0.5)
    statistics.waited("a", held_s=0.0, queued_s=1.5)
    registry = collected(statistics)
    found = {
        name: registry.get_sample_value(f"headrace_hub_{name}", {"environment": "a"})
        for name in ("hold_seconds_sum", "hold_seconds_count", "queue_seconds_sum", "queue_seconds_count")
    }
    assert found == {"hold_seconds_sum": 2.0, "hold_seconds_count": 1, "queue_seconds_sum": 2.0, "queue_seconds_count": 2}


def test_failed_attempts_are_counted_by_engine_environment_and_reason():
    statistics = CallStatistics()
    for reason in ("cut", "cut", "aborted"):
        statistics.failed("e", "a", reason)
    registry = collected(statistics)
    labels = {"engine": "e", "environment": "a"}
    assert registry.get_sample_value("headrace_hub_attempt_failures_total", labels | {"reason": "cut"}) == 2
    assert registry.get_sample_value("headrace_hub_attempt_failures_total", labels | {"reason": "aborted"}) == 1


def test_first_tokens_are_timed_where_the_engine_tells():
    statistics = CallStatistics()
    for first_token_s in (0.25, None):
        statistics.answered("e", "a", prompt_tokens=1, cached_tokens=0, output_tokens=1, engine_s=1, first_token_s=first_token_s)
    registry = collected(statistics)
    labels = {"engine": "e", "environment": "a"}
    assert registry.get_sample_value("headrace_hub_first_token_seconds_sum", labels) == 0.25
    assert registry.get_sample_value("headrace_hub_first_token_seconds_count", labels) == 1


def test_what_the_hub_adds_has_buckets_below_a_millisecond():
    statistics = CallStatistics()
    for seconds in (0.00005, 0.0004, 0.0006):
        statistics.added(seconds)
    registry = collected(statistics)
    values = [registry.get_sample_value("headrace_hub_added_seconds_bucket", {"le": le}) for le in ("0.0001", "0.0005", "0.001")]
    assert values == [1, 2, 3]


def test_an_engine_that_is_gone_has_no_metrics():
    statistics = CallStatistics()
    statistics.answered("e", "a", prompt_tokens=1, cached_tokens=0, output_tokens=1, engine_s=1)
    statistics.failed("e", "a", "cut")
    statistics.forget("e")
    assert "e" not in str([family.samples for family in statistics.collect() if family.name == "headrace_hub_attempt_failures"])
    assert collected(statistics).get_sample_value("headrace_hub_completed_calls_total", {"engine": "e", "environment": "a"}) is None


def test_callers_cannot_make_metrics_without_end():
    statistics = CallStatistics()
    for index in range(MAX_ENVIRONMENTS + 50):
        statistics.answered("e", f"environment {index}", prompt_tokens=1, cached_tokens=0, output_tokens=1, engine_s=1)
    value = collected(statistics).get_sample_value("headrace_hub_completed_calls_total", {"engine": "e", "environment": OTHER})
    assert value == 50
