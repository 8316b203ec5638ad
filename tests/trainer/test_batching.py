"""Micro-batches: nothing lost, nothing over the limit, ranks in step."""

from hypothesis import given
from hypothesis import strategies as st

from trainer.batching import PlannedSequence, entry_ids, plan_shares

lengths = st.lists(st.integers(1, 300), min_size=1, max_size=60)


def sequences(lengths):
    return [PlannedSequence(f"e{index}", length, 0.0, 0.0) for index, length in enumerate(lengths)]


@given(lengths, st.integers(1, 5), st.integers(50, 2000))
def test_every_sequence_is_in_exactly_one_micro_batch(lengths, num_ranks, max_tokens):
    shares = plan_shares(sequences(lengths), num_ranks=num_ranks, max_tokens=max_tokens)
    planned = [entry for share in shares for entry in entry_ids(share)]
    assert sorted(planned) == sorted(f"e{index}" for index in range(len(lengths)))


@given(lengths, st.integers(1, 5), st.integers(50, 2000))
def test_every_rank_has_as_many_micro_batches(lengths, num_ranks, max_tokens):
    shares = plan_shares(sequences(lengths), num_ranks=num_ranks, max_tokens=max_tokens)
    assert len(shares) == num_ranks
    assert len({len(share) for share in shares}) == 1


@given(lengths, st.integers(1, 5), st.integers(50, 2000))
def test_padded_tokens_stay_under_the_limit_unless_one_sequence_is_longer(lengths, num_ranks, max_tokens):
    for share in plan_shares(sequences(lengths), num_ranks=num_ranks, max_tokens=max_tokens):
        for rows in share:
            padded = len(rows) * max((row.num_tokens for row in rows), default=0)
            assert padded <= max_tokens or len(rows) == 1


@given(lengths, st.integers(2, 5))
def test_ranks_differ_by_at_most_the_longest_sequence(lengths, num_ranks):
    shares = plan_shares(sequences(lengths), num_ranks=num_ranks, max_tokens=10**6)
    tokens = [sum(row.num_tokens for rows in share for row in rows) for share in shares]
    assert max(tokens) - min(tokens) <= max(lengths)


def test_rows_of_like_length_share_a_micro_batch():
    (share,) = plan_shares(sequences([10, 100, 12, 98, 11, 99]), num_ranks=1, max_tokens=300)
    assert [[row.num_tokens for row in rows] for rows in share] == [[100, 99, 98], [12, 11, 10]]


def test_a_rank_without_a_sequence_steps_along_with_an_empty_micro_batch():
    shares = plan_shares(sequences([5]), num_ranks=2, max_tokens=100)
    assert [len(share) for share in shares] == [1, 1]
    assert shares[1] == ((),)


def test_the_plan_does_not_depend_on_the_order_of_delivery():
    forward = plan_shares(sequences([7, 7, 9, 3]), num_ranks=2, max_tokens=20)
    backward = plan_shares(reversed(sequences([7, 7, 9, 3])), num_ranks=2, max_tokens=20)
    assert forward == backward
