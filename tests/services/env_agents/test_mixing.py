from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from services.env_agents.mixing import next_environment

WEIGHTS = st.dictionaries(st.sampled_from("abcdef"), st.floats(0.01, 100), min_size=1)


def choose(weights, count, credit=None):
    chosen, credit = [], credit or {}
    for _ in range(count):
        name, credit = next_environment(weights, credit)
        chosen.append(name)
    return chosen, credit


@given(WEIGHTS, st.integers(1, 200))
def test_counts_stay_within_one_of_each_share_at_any_time(weights, count):
    counts = Counter(choose(weights, count)[0])
    total = sum(weights.values())
    for name, weight in weights.items():
        assert abs(counts[name] - count * weight / total) < len(weights)


@given(WEIGHTS, st.integers(0, 200))
def test_credits_add_up_to_nothing_owed(weights, count):
    _, credit = choose(weights, count)
    assert abs(sum(credit.values())) < 1e-6


def test_choices_are_spread_rather_than_bunched():
    assert "".join(choose({"a": 3, "b": 1}, 8)[0]) == "aabaaaba"


def test_newcomer_does_not_catch_up_on_the_past():
    _, credit = choose({"a": 1}, 1000)
    assert Counter(choose({"a": 1, "b": 1}, 10, credit)[0]) == {"a": 5, "b": 5}


def test_weight_of_zero_is_never_chosen():
    assert set(choose({"a": 0, "b": 1}, 10)[0]) == {"b"}
    assert next_environment({"a": 0}, {}) is None
    assert next_environment({}, {}) is None
