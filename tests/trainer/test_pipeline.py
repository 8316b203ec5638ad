"""What a stretch of updates adds up to, by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.trajectory import Timings
from trainer.pipeline import EngineReading, EngineSeconds, Stretch, engine_seconds, rise, tokens_by_lag


def reading(engine_id, ready_s, idle_s, used_s, max_tokens=4000):
    return EngineReading(engine_id, 1, None, max_tokens, ready_s, idle_s, used_s)


def test_engine_seconds_are_what_lies_between_two_readings():
    before = [reading("a", 100, 40, 30), reading("b", 10, 10, 0)]
    after = [reading("a", 110, 42, 36), reading("b", 20, 15, 4)]
    seconds = engine_seconds(before, after)
    assert seconds == EngineSeconds(ready_s=20, idle_s=7, used_s=10, limited_s=20)
    assert (seconds.busy_s, seconds.idle_share, seconds.utilisation) == (13, 0.35, 0.5)


def test_counters_of_a_hub_that_began_anew_count_from_zero_and_so_do_engines_that_joined():
    seconds = engine_seconds([reading("a", 100, 40, 30)], [reading("a", 6, 3, 3), reading("new", 2, 1, 1)])
    assert seconds == EngineSeconds(ready_s=8, idle_s=4, used_s=4, limited_s=8)


def test_an_engine_that_does_not_say_what_it_can_run_has_no_utilisation():
    seconds = engine_seconds([], [reading("a", 10, 5, 0, max_tokens=None)])
    assert (seconds.idle_share, seconds.utilisation) == (0.5, None)
    assert EngineSeconds().idle_share is None


STRETCH = Stretch(
    num_updates=1,
    update_s=10,
    wait_s=4,
    train_s=5,
    engines=EngineSeconds(20, 2, 15, 20),
    num_episodes=2,
    timings=Timings(2, 4, 8, 2),
    trained_tokens=70,
    discarded_tokens={"stale": 20},
    num_fallen_back=1,
)


def test_shares_of_a_stretch():
    assert (STRETCH.wait_share, STRETCH.trainer_idle_share, STRETCH.episode_s) == (0.4, 0.5, 8)
    assert STRETCH.episode_shares == {"queued": 0.125, "generating": 0.25, "environment": 0.5, "reward": 0.125}
    assert (STRETCH + Stretch(trained_tokens=5, discarded_tokens={"stale": 1, "surplus": 4})).discarded_token_shares == {
        "stale": pytest.approx(0.21),
        "surplus": pytest.approx(0.04),
    }


def test_shares_of_nothing_are_no_division_by_zero():
    nothing = Stretch()
    assert (nothing.wait_share, nothing.trainer_idle_share, nothing.episode_s) == (0, 0, 0)
    assert (nothing.episode_shares, nothing.discarded_token_shares) == ({}, {})


def test_stretches_add_up():
    twice = STRETCH + STRETCH
    assert (twice.num_updates, twice.update_s, twice.wait_s, twice.train_s, twice.num_episodes) == (2, 20, 8, 10, 4)
    assert (twice.engines, twice.timings) == (EngineSeconds(40, 4, 30, 40), Timings(4, 8, 16, 4))
    assert (twice.trained_tokens, twice.discarded_tokens, twice.num_fallen_back) == (140, {"stale": 40}, 2)
    assert twice.wait_share == STRETCH.wait_share


def test_rise_is_of_what_rose():
    assert rise({"stale": 3, "failed": 1}, {"stale": 5, "failed": 1, "gone": 2}) == {"stale": 2, "gone": 2}


def test_tokens_by_lag_and_a_lineage_that_was_cut_off_has_none():
    assert tokens_by_lag([(5, 10), (3, 4), (5, 1), (9, 2)], trained_version=5) == {0: 13, 2: 4}


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 99)), max_size=20), st.integers(0, 9))
def test_no_token_is_missing_from_the_histogram(sampled, version):
    counted = tokens_by_lag(sampled, version)
    assert sum(counted.values()) == sum(count for _, count in sampled)
    assert list(counted) == sorted(counted)
