"""Whether an engine hangs, in virtual time: by hand, and that no engine that works is ever taken for one that hangs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.inference_hub.progress import Progress


class Looks:
    """Looks at one engine, two seconds apart."""

    def __init__(self) -> None:
        self.now = 1_000.0
        self.progress = Progress()

    def silent_s(self, step: float, *, busy_period: int | None = 1, has_answered: bool = False) -> float:
        self.now += 2
        return self.progress.silent_s(self.now, busy_period=busy_period, has_answered=has_answered, step=step)


def test_silence_counts_from_the_last_look_that_found_a_sign():
    looks = Looks()
    assert [looks.silent_s(step) for step in (7.0, 7.0, 7.0, 8.0, 8.0, 8.0)] == [0, 2, 4, 0, 2, 4]


def test_an_answer_is_a_sign():
    looks = Looks()
    assert [looks.silent_s(7.0, has_answered=answered) for answered in (False, False, True, False)] == [0, 2, 0, 2]


@pytest.mark.parametrize("idle", [None, 2])
def test_an_engine_without_calls_or_with_new_ones_was_not_silent(idle: int | None):
    """A look that finds the next time with calls does not know how long it lasts."""
    looks = Looks()
    looks.silent_s(7.0)
    looks.silent_s(7.0)
    assert looks.silent_s(7.0, busy_period=idle) == 0
    assert looks.silent_s(7.0, busy_period=3) == 0
    assert looks.silent_s(7.0, busy_period=3) == 2


def test_an_engine_that_does_not_answer_at_all_is_silent():
    looks = Looks()
    assert [looks.silent_s(step) for step in (7.0, 0.0, 0.0, 7.0)] == [0, 2, 4, 6]


def test_of_an_engine_that_never_told_its_steps_nothing_can_be_said():
    looks = Looks()
    assert [looks.silent_s(0.0) for _ in range(5)] == [0] * 5


@given(st.lists(st.tuples(st.booleans(), st.sampled_from(["step", "answer", "pause", "idle"])), max_size=50))
def test_an_engine_is_never_silent_for_longer_than_it_shows_nothing(history):
    """`silence` is the most that may be said: seconds since something happened, which looks may find late and never early."""
    looks, step, period, silence = Looks(), 7.0, 1, 0.0
    for happens, what in history:
        if happens:
            step += what == "step"
            period += what == "idle"
        busy_period = None if happens and what == "pause" else period
        found = looks.silent_s(step, busy_period=busy_period, has_answered=happens and what == "answer")
        silence = 0.0 if happens else silence + 2
        assert found <= silence
        assert found == 0 if happens else True
