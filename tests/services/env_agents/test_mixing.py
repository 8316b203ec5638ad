from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.env_agents.mixing import MAX_OWED_GROUPS, Candidate, next_environment, shares

WEIGHTS = st.dictionaries(st.sampled_from("abcdef"), st.floats(0.01, 100), min_size=1)


@st.composite
def mixes(draw) -> dict[str, Candidate]:
    """Environments with weights, some of them 0, and minimum shares that leave room for one another."""
    names = draw(st.lists(st.sampled_from("abcdef"), min_size=1, unique=True))
    parts = [draw(st.floats(0, 1)) for _ in names]
    scale = draw(st.floats(0, 1)) / max(1.0, sum(parts))
    made = [Candidate(draw(st.sampled_from([0.0, 0.1, 1.0, 7.0])), part * scale) for part in parts]
    mix = {name: each for name, each in zip(names, made, strict=True) if each.weight > 0 or each.min_share > 1e-6}
    return mix or {"a": Candidate(1.0)}


def of(weights) -> dict[str, Candidate]:
    return {name: Candidate(weight) for name, weight in weights.items()}


def choose(candidates, count, credit=None):
    chosen, credit = [], credit or {}
    for _ in range(count):
        name, credit = next_environment(candidates, credit)
        chosen.append(name)
    return chosen, credit


@given(WEIGHTS, st.integers(1, 200))
def test_counts_stay_within_one_of_each_share_at_any_time(weights, count):
    counts = Counter(choose(of(weights), count)[0])
    total = sum(weights.values())
    for name, weight in weights.items():
        assert abs(counts[name] - count * weight / total) < len(weights)


@given(mixes(), st.integers(1, 200))
def test_counts_follow_shares_with_minimums_too(mix, count):
    counts = Counter(choose(mix, count)[0])
    for name, share in shares(mix).items():
        assert abs(counts[name] - count * share) <= len(mix)


@given(mixes())
def test_shares_are_at_least_the_minimums_and_by_weight_above_them(mix):
    found = shares(mix)
    assert sum(found.values()) == pytest.approx(1.0)
    assert all(found[name] >= each.min_share - 1e-9 for name, each in mix.items())
    per_weight = {name: found[name] / each.weight for name, each in mix.items() if each.weight > 0}
    above = [per_weight[name] for name in per_weight if found[name] > mix[name].min_share + 1e-6]
    assert max(above, default=0) == pytest.approx(min(above, default=0))
    assert all(share >= max(above, default=0) - 1e-6 for share in per_weight.values()), "a minimum only ever adds"


@given(mixes(), st.data())
def test_minimum_shares_are_kept_over_times_without_places(mix, data):
    """What an environment got, and what it is still owed, make up its minimum share of all groups."""
    credit, counts = {}, Counter()
    num_groups, forgiven = 0, Counter()
    for full in data.draw(st.lists(st.sets(st.sampled_from(sorted(mix))), min_size=1, max_size=60)):
        now = {name: Candidate(each.weight, each.min_share, can_start=name not in full) for name, each in mix.items()}
        choice = next_environment(now, credit)
        if choice is None:
            assert full == set(mix)
            continue
        before, (name, credit) = credit, choice
        assert name not in full
        counts[name] += 1
        num_groups += 1
        for blocked in full:
            forgiven[blocked] += mix[blocked].min_share - (credit[blocked] - before.get(blocked, 0.0))
        assert sum(credit.values()) == pytest.approx(0, abs=1e-6)
        assert max(credit.values()) <= MAX_OWED_GROUPS + len(mix)
    for name, each in mix.items():
        assert counts[name] >= each.min_share * num_groups - credit.get(name, 0.0) - forgiven[name] - 1e-6
        assert forgiven[name] < 1e-6 or each.min_share * num_groups > MAX_OWED_GROUPS - len(mix), "only beyond the bound"


def test_what_was_missed_while_full_is_made_up_for():
    full = {"a": Candidate(1, min_share=0.25, can_start=False), "b": Candidate(9)}
    free = {"a": Candidate(1, min_share=0.25), "b": Candidate(9)}
    first, credit = choose(full, 40)
    assert set(first) == {"b"}
    then, credit = choose(free, 14, credit)
    assert Counter(then) == {"a": 14}
    assert Counter(choose(free, 40, credit)[0]) == {"a": 10, "b": 30}


def test_what_was_missed_beyond_the_bound_is_forgiven():
    full = {"a": Candidate(1, min_share=0.5, can_start=False), "b": Candidate(1)}
    credit = choose(full, 10_000)[1]
    assert credit == pytest.approx({"a": MAX_OWED_GROUPS, "b": -MAX_OWED_GROUPS})


def test_without_a_minimum_share_nothing_is_made_up_for():
    credit = choose({"a": Candidate(1, can_start=False), "b": Candidate(1)}, 100)[1]
    assert Counter(choose(of({"a": 1, "b": 1}), 10, credit)[0]) == {"a": 5, "b": 5}


def test_minimum_share_counts_without_weight():
    mix = {"a": Candidate(0, min_share=0.2), "b": Candidate(1)}
    assert "".join(choose(mix, 10)[0]).count("a") == 2
    assert set(choose({"a": Candidate(0, min_share=0.2)}, 3)[0]) == {"a"}


@given(WEIGHTS, st.integers(0, 200))
def test_credits_add_up_to_nothing_owed(weights, count):
    _, credit = choose(of(weights), count)
    assert abs(sum(credit.values())) < 1e-6


def test_choices_are_spread_rather_than_bunched():
    assert "".join(choose(of({"a": 3, "b": 1}), 8)[0]) == "aabaaaba"


def test_newcomer_does_not_catch_up_on_the_past():
    _, credit = choose(of({"a": 1}), 1000)
    assert Counter(choose(of({"a": 1, "b": 1}), 10, credit)[0]) == {"a": 5, "b": 5}


def test_weight_of_zero_is_never_chosen():
    assert set(choose(of({"a": 0, "b": 1}), 10)[0]) == {"b"}
    assert next_environment(of({"a": 0}), {}) is None
    assert next_environment({"a": Candidate(1, can_start=False)}, {}) is None
    assert next_environment({}, {}) is None
