"""Micro-batches: nothing lost, nothing over the limit, ranks in step and equally loaded."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.trainer.workload import lengths as long_tailed_lengths
from trainer.batching import BatchPlan, PlannedSequence, SequenceCost, by_step, entry_ids, mini_batches, plan_shares, plan_update

lengths = st.lists(st.integers(1, 300), min_size=1, max_size=60)
costs = st.sampled_from([SequenceCost(), SequenceCost(break_even_tokens=100.0)])


def sequences(lengths, *, prefix="e"):
    return [PlannedSequence(f"{prefix}{index}", length, length // 2 + 1, 0.0, 0.0) for index, length in enumerate(lengths)]


def tokens_of(rows):
    return sum(row.num_tokens for row in rows)


@given(lengths, st.integers(1, 5), st.integers(50, 2000), costs)
def test_every_sequence_is_in_exactly_one_micro_batch(lengths, num_ranks, max_tokens, cost):
    shares = plan_shares(sequences(lengths), num_ranks=num_ranks, max_tokens=max_tokens, cost=cost)
    planned = [entry for share in shares for entry in entry_ids(share)]
    assert sorted(planned) == sorted(f"e{index}" for index in range(len(lengths)))


@given(lengths, st.integers(1, 5), st.integers(50, 2000), costs)
def test_every_rank_has_as_many_micro_batches(lengths, num_ranks, max_tokens, cost):
    shares = plan_shares(sequences(lengths), num_ranks=num_ranks, max_tokens=max_tokens, cost=cost)
    assert len(shares) == num_ranks
    assert len({len(share) for share in shares}) == 1


@given(lengths, st.integers(1, 5), st.integers(50, 2000), costs)
def test_tokens_stay_under_the_limit_unless_one_sequence_is_longer(lengths, num_ranks, max_tokens, cost):
    for share in plan_shares(sequences(lengths), num_ranks=num_ranks, max_tokens=max_tokens, cost=cost):
        assert all(tokens_of(rows) <= max_tokens or len(rows) == 1 for rows in share)


@given(lengths, st.integers(2, 5), costs)
def test_ranks_differ_by_at_most_the_dearest_sequence(lengths, num_ranks, cost):
    shares = plan_shares(sequences(lengths), num_ranks=num_ranks, max_tokens=10**6, cost=cost)
    loads = [sum(cost(row.num_tokens) for rows in share for row in rows) for share in shares]
    assert max(loads) - min(loads) <= cost(max(lengths)) * (1 + 1e-9)


@given(lengths, st.integers(1, 5), st.integers(300, 2000), costs)
def test_micro_batches_are_not_many_more_than_tokens_need(lengths, num_ranks, max_tokens, cost):
    shares = plan_shares(sequences(lengths), num_ranks=num_ranks, max_tokens=max_tokens, cost=cost)
    dearest = max(sum(row.num_tokens for rows in share for row in rows) for share in shares)
    assert len(shares[0]) <= 2 * math.ceil(dearest / max_tokens) + 1


@pytest.mark.parametrize("num_episodes", [16, 128])
@pytest.mark.parametrize("max_tokens", [2048, 4096, 16384])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_ranks_share_a_long_tailed_batch_within_three_percent(num_episodes, max_tokens, num_ranks):
    cost = SequenceCost(break_even_tokens=5_000.0)
    shares = plan_shares(sequences(long_tailed_lengths(num_episodes)), num_ranks=num_ranks, max_tokens=max_tokens, cost=cost)
    loads = [sum(cost(row.num_tokens) for rows in share for row in rows) for share in shares]
    assert max(loads) / (sum(loads) / num_ranks) - 1 <= 0.03


def test_a_rank_with_one_long_sequence_has_as_many_micro_batches_as_one_with_many_short_ones():
    shares = plan_shares(sequences([100, 40, 40, 40]), num_ranks=2, max_tokens=100, cost=SequenceCost())
    assert [[[row.num_tokens for row in rows] for rows in share] for share in shares] == [[[100], []], [[40, 40], [40]]]


def test_attention_counts_quadratically():
    cost = SequenceCost(break_even_tokens=1000.0)
    assert [cost(0), cost(100), cost(1000)] == [0.0, pytest.approx(110.0), pytest.approx(2000.0)]
    lengths = [1000, 400, 400, 400, 400]
    dear = plan_shares(sequences(lengths), num_ranks=2, max_tokens=10**6, cost=SequenceCost(break_even_tokens=100.0))
    assert sorted(tokens_of(rows) for (rows,) in dear) == [1000, 1600], "11000 against 4 x 2000"
    cheap = plan_shares(sequences(lengths), num_ranks=2, max_tokens=10**6, cost=SequenceCost())
    assert sorted(tokens_of(rows) for (rows,) in cheap) == [1200, 1400]


def test_a_rank_without_a_sequence_steps_along_with_an_empty_micro_batch():
    shares = plan_shares(sequences([5]), num_ranks=2, max_tokens=100, cost=SequenceCost())
    assert sorted(len(rows) for (rows,) in shares) == [0, 1]


def test_the_plan_does_not_depend_on_the_order_of_delivery():
    forward, backward = (
        plan_shares(rows, num_ranks=2, max_tokens=20, cost=SequenceCost())
        for rows in (sequences([7, 7, 9, 3]), reversed(sequences([7, 7, 9, 3])))
    )
    assert forward == backward


@given(st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=5), min_size=1, max_size=8), st.integers(1, 9))
def test_mini_batches_of_groups_keep_groups_whole_and_in_order(lengths, size):
    groups = [sequences(each, prefix=f"g{index}-") for index, each in enumerate(lengths)]
    batches = mini_batches(groups, size=size, unit="group")
    assert [sequence for batch in batches for sequence in batch] == [sequence for group in groups for sequence in group]
    assert len(batches) == math.ceil(len(groups) / size)
    for batch in batches[:-1]:
        assert len({sequence.entry_id.split("-")[0] for sequence in batch}) == size


def test_mini_batches_of_episodes_part_siblings():
    groups = [sequences([1, 1], prefix="a"), sequences([1, 1], prefix="b"), sequences([1], prefix="c")]
    batches = mini_batches(groups, size=3, unit="episode")
    assert [[sequence.entry_id for sequence in batch] for batch in batches] == [["a0", "b0", "c0"], ["a1", "b1"]]


def test_no_size_is_one_mini_batch():
    groups = [sequences([1, 1], prefix="a"), sequences([1], prefix="b")]
    assert [len(batch) for unit in ("group", "episode") for batch in mini_batches(groups, size=None, unit=unit)] == [3, 3]


def test_a_group_without_a_trainable_token_makes_no_empty_mini_batch():
    assert mini_batches([[], sequences([1])], size=1, unit="group") == [sequences([1])]


def test_each_step_has_its_own_size_and_micro_batches():
    batches = [sequences([6, 6, 6], prefix="a"), sequences([9], prefix="b")]
    plan = plan_update(batches, version=3, oldest_version=2, num_ranks=2, max_tokens=12, cost=SequenceCost())
    assert [(step.num_micro_batches, step.num_sequences, step.num_sampled_tokens) for step in plan.steps] == [(1, 3, 12), (1, 1, 5)]
    assert (plan.size.num_sequences, plan.size.num_sampled_tokens) == (4, 17)
    prefixes = [
        [{row.entry_id[0] for row in rows} for _, share in by_step(plan.steps, part) for rows in share] for part in plan.shares
    ]
    assert sorted(prefixes, key=str, reverse=True) == [[{"a"}, {"b"}], [{"a"}, set()]]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=BatchPlan) == plan
