"""Seconds of an engine's life, by hand and over any sequence of changes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.inference_hub.usage import Usage, UsageSeconds


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_seconds_go_to_the_state_that_was(clock):
    usage = Usage(clock)
    clock.now += 5  # Not ready yet.
    usage.readiness(True)
    clock.now += 2  # Idle.
    usage.calls(1, max_running_calls=2)
    clock.now += 3
    usage.calls(4, max_running_calls=2)  # Two of them wait in the engine.
    clock.now += 1
    assert usage.read() == UsageSeconds(ready_s=6, idle_s=2, running_s=5)
    usage.readiness(False)  # Paused with its calls.
    clock.now += 10
    usage.readiness(True)
    usage.calls(0, max_running_calls=2)
    clock.now += 4
    assert usage.read() == UsageSeconds(ready_s=10, idle_s=6, running_s=5)


def test_an_engine_that_does_not_say_what_it_can_run_runs_every_call(clock):
    usage = Usage(clock)
    usage.readiness(True)
    usage.calls(7, max_running_calls=None)
    clock.now += 2
    assert usage.read().running_s == 14


@st.composite
def changes(draw):
    return draw(
        st.lists(st.tuples(st.integers(0, 100), st.sampled_from(["ready", "not ready", "read"]) | st.integers(0, 8)), max_size=40)
    )


@given(changes())
def test_seconds_only_rise_and_reading_changes_nothing(steps):
    clocks = Clock(), Clock()
    watched, left_alone = Usage(clocks[0]), Usage(clocks[1])
    before = watched.read()
    for seconds, change in steps:
        for usage, clock in zip((watched, left_alone), clocks, strict=True):
            clock.now += seconds
            if isinstance(change, int):
                usage.calls(change, max_running_calls=4)
            elif change != "read":
                usage.readiness(change == "ready")
        now = watched.read()
        assert before.ready_s <= now.ready_s
        assert before.idle_s <= now.idle_s
        assert before.running_s <= now.running_s
        assert 0 <= now.idle_s <= now.ready_s
        assert now.running_s <= 4 * (now.ready_s - now.idle_s)
        before = now
    assert left_alone.read() == before
