"""Seconds of an engine's life, by hand and over any sequence of changes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.inference_hub.usage import Limits, Usage, UsageSeconds


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
    usage.calls(1, 0.5)
    clock.now += 3
    usage.calls(4, 1.0)
    clock.now += 1
    assert usage.read() == UsageSeconds(ready_s=6, idle_s=2, used_s=2.5)
    usage.readiness(False)  # Paused with its calls.
    clock.now += 10
    usage.readiness(True)
    usage.calls(0, 0.0)
    clock.now += 4
    assert usage.read() == UsageSeconds(ready_s=10, idle_s=6, used_s=2.5)


@pytest.mark.parametrize(
    ("limits", "share"),
    [
        (Limits(), None),
        (Limits(calls=8), 0.5),
        (Limits(tokens=1000), 0.6),
        (Limits(calls=4096, tokens=1000), 0.6),  # SGLang's bound on calls is seldom the one that counts.
        (Limits(calls=2, tokens=1000), 1.0),  # Two of the calls wait in it.
    ],
)
def test_the_nearer_limit_says_what_is_used(limits, share):
    assert limits.share_used(4, 600) == share


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
                usage.calls(change, Limits(calls=4).share_used(change, 0))
            elif change != "read":
                usage.readiness(change == "ready")
        now = watched.read()
        assert before.ready_s <= now.ready_s
        assert before.idle_s <= now.idle_s
        assert before.used_s <= now.used_s
        assert 0 <= now.idle_s <= now.ready_s
        assert now.used_s <= now.ready_s - now.idle_s
        before = now
    assert left_alone.read() == before
