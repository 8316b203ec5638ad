"""Advantages by token, by hand, against a slow loop, and independent of observations, padding and micro-batches."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.token_advantages import discounted_returns, generalised_advantages, normalised, rewards_at_turn_ends

EPS = 1e-6


def row(*values):
    return torch.tensor([values], dtype=torch.float64)


def mask_of(*values):
    return torch.tensor([values]).bool()


def alone(_):
    """The sum over one rank."""


def test_returns_by_hand():
    # γ = 1/2, an observation in the middle: the reward 4 is two sampled tokens from the first, not three.
    returns = discounted_returns(row(0, 1, 0, 0, 4, 0), mask_of(0, 1, 1, 0, 1, 0), discount=0.5)
    np.testing.assert_allclose(returns[0], [0, 2, 2, 0, 4, 0], rtol=1e-5)


def test_gae_by_hand():
    # γ = 1/2, λ = 1/2. V = 1, 2, 4 and rewards 0, 0, 8:
    # δ = 0 + 1 - 1, 0 + 2 - 2, 8 - 4 = 0, 0, 4;   A = 4/16, 4/4, 4.
    found = generalised_advantages(row(0, 0, 0, 0, 8), row(0, 1, 2, 0, 4), mask_of(0, 1, 1, 0, 1), discount=0.5, gae_lambda=0.5)
    np.testing.assert_allclose(found.advantages_BT[0], [0, 0.25, 1, 0, 4], rtol=1e-5)
    np.testing.assert_allclose(found.returns_BT[0], [0, 1.25, 3, 0, 8], rtol=1e-5)


def test_gae_by_hand_with_rewards_on_the_way():
    # γ = 1, λ = 1/2. V = 3, 1; rewards 2, 5: δ = 2 + 1 - 3, 5 - 1 = 0, 4; A = 2, 4.
    found = generalised_advantages(row(2, 5), row(3, 1), mask_of(1, 1), discount=1.0, gae_lambda=0.5)
    np.testing.assert_allclose(found.advantages_BT[0], [2, 4], rtol=1e-5)
    np.testing.assert_allclose(found.returns_BT[0], [5, 5], rtol=1e-5)


def test_turn_rewards_are_at_the_last_sampled_token_of_their_turn():
    mask = mask_of(0, 1, 1, 0, 1, 0)
    turns = torch.tensor([[-1, 0, 0, -1, 1, -1]])
    np.testing.assert_array_equal(rewards_at_turn_ends([(3.0, 5.0)], turns, mask), [[0, 0, 3, 0, 5, 0]])


def test_reward_of_a_turn_that_sampled_nothing_stays_in_the_episode():
    mask, turns = mask_of(0, 1, 1, 1), torch.tensor([[-1, 1, 1, 3]])
    found = rewards_at_turn_ends([(1.0, 10.0, 100.0, 1000.0, 10000.0)], turns, mask)
    np.testing.assert_array_equal(found, [[0, 1, 110, 11000]])


def test_padding_rows_have_no_reward():
    mask, turns = mask_of(0, 1).repeat(2, 1), torch.tensor([[-1, 0], [-1, -1]])
    mask[1] = False
    np.testing.assert_array_equal(rewards_at_turn_ends([(1.0,)], turns, mask), [[0, 1], [0, 0]])


def test_normalised_by_hand():
    # 1, 2 and 6 in two micro-batches: mean 3, variance (4 + 1 + 9) / 2.
    parts = normalised([row(1, 9, 2), row(6)], [mask_of(1, 0, 1), mask_of(1)], sum_over_ranks=alone)
    std = math.sqrt(7) + EPS
    np.testing.assert_allclose(parts[0], [[-2 / std, 0, -1 / std]], rtol=1e-5)
    np.testing.assert_allclose(parts[1], [[3 / std]], rtol=1e-5)


def test_a_rank_without_sampled_tokens_takes_part_in_the_normalisation():
    sums = iter([torch.tensor([9.0, 3.0]).double(), torch.tensor(14.0).double()])

    def of_the_other_rank(tensor):
        tensor += next(sums)

    (part,) = normalised([row(5, 5)], [mask_of(0, 0)], sum_over_ranks=of_the_other_rank)
    np.testing.assert_array_equal(part, [[0, 0]])
    assert next(sums, None) is None


SEQUENCE = st.lists(
    st.tuples(st.booleans(), st.floats(-2, 2).map(lambda x: round(x, 2)), st.floats(-3, 3).map(lambda x: round(x, 2))),
    min_size=1,
    max_size=20,
)


def tensors(sequences):
    length = max(map(len, sequences))
    padded = [sequence + [(False, 0.0, 0.0)] * (length - len(sequence)) for sequence in sequences]
    mask = torch.tensor([[token[0] for token in sequence] for sequence in padded])
    rewards = torch.tensor([[token[1] if token[0] else 0.0 for token in sequence] for sequence in padded], dtype=torch.float64)
    values = torch.tensor([[token[2] for token in sequence] for sequence in padded], dtype=torch.float64)
    return rewards, values, mask


def slow_gae(sequence, discount, gae_lambda):
    """Advantages of the sampled tokens, each by its own sum."""
    sampled = [(reward, value) for is_sampled, reward, value in sequence if is_sampled]
    deltas = [
        reward + discount * (sampled[t + 1][1] if t + 1 < len(sampled) else 0.0) - value
        for t, (reward, value) in enumerate(sampled)
    ]
    return [
        math.fsum((discount * gae_lambda) ** lag * deltas[t + lag] for lag in range(len(deltas) - t)) for t in range(len(deltas))
    ]


@given(st.lists(SEQUENCE, min_size=1, max_size=4), st.sampled_from([0.0, 0.5, 0.99, 1.0]), st.sampled_from([0.0, 0.95, 1.0]))
def test_gae_equals_a_slow_loop(sequences, discount, gae_lambda):
    rewards, values, mask = tensors(sequences)
    found = generalised_advantages(rewards, values, mask, discount=discount, gae_lambda=gae_lambda)
    for index, sequence in enumerate(sequences):
        expected = np.array(slow_gae(sequence, discount, gae_lambda))
        np.testing.assert_allclose(found.advantages_BT[index][mask[index]], expected, rtol=1e-5, atol=1e-9)
        np.testing.assert_allclose(
            found.returns_BT[index][mask[index]], expected + values[index][mask[index]].numpy(), rtol=1e-5, atol=1e-9
        )
    assert not found.advantages_BT[~mask].any()
    assert not found.returns_BT[~mask].any()


@given(SEQUENCE, st.sampled_from([0.0, 0.9, 1.0]))
def test_returns_equal_a_slow_loop(sequence, discount):
    rewards, _, mask = tensors([sequence])
    sampled = rewards[0][mask[0]].tolist()
    expected = [math.fsum(discount**lag * sampled[t + lag] for lag in range(len(sampled) - t)) for t in range(len(sampled))]
    np.testing.assert_allclose(discounted_returns(rewards, mask, discount=discount)[0][mask[0]], expected, rtol=1e-5, atol=1e-9)


@given(SEQUENCE.filter(lambda sequence: any(token[0] for token in sequence)))
def test_gae_with_observations_is_that_of_the_sequence_without_them(sequence):
    rewards, values, mask = tensors([sequence])
    with_observations = generalised_advantages(rewards, values, mask, discount=0.9, gae_lambda=0.8)
    short_rewards, short_values, short_mask = tensors([[token for token in sequence if token[0]]])
    without = generalised_advantages(short_rewards, short_values, short_mask, discount=0.9, gae_lambda=0.8)
    assert short_mask.all()
    torch.testing.assert_close(with_observations.advantages_BT[mask], without.advantages_BT[short_mask])
    torch.testing.assert_close(with_observations.returns_BT[mask], without.returns_BT[short_mask])


@given(SEQUENCE)
def test_with_lambda_one_and_no_discount_returns_do_not_depend_on_values(sequence):
    rewards, values, mask = tensors([sequence])
    found = generalised_advantages(rewards, values, mask, discount=1.0, gae_lambda=1.0)
    torch.testing.assert_close(found.returns_BT, discounted_returns(rewards, mask, discount=1.0), rtol=1e-9, atol=1e-9)


@given(st.lists(SEQUENCE, min_size=1, max_size=5), st.data())
def test_normalisation_does_not_depend_on_micro_batches(sequences, data):
    whole = normalised(*(lambda parts: (parts[1:2], parts[2:]))(tensors(sequences)), sum_over_ranks=alone)[0]
    rows = [tensors([sequence]) for sequence in sequences]
    cut = normalised([part[1] for part in rows], [part[2] for part in rows], sum_over_ranks=alone)
    for index, part in enumerate(cut):
        torch.testing.assert_close(part[0], whole[index][: part.shape[1]], rtol=1e-7, atol=1e-7)
    tokens = whole[tensors(sequences)[2]]
    if len(tokens) > 1 and tokens.any():
        assert tokens.mean().item() == pytest.approx(0, abs=1e-6)
        assert tokens.std().item() == pytest.approx(1, rel=1e-2)


def test_long_sequences_keep_their_precision():
    generator = torch.Generator().manual_seed(3)
    rewards, values = torch.randn(2, 1, 5000, generator=generator, dtype=torch.float64)
    found = generalised_advantages(rewards, values, torch.ones(1, 5000).bool(), discount=1.0, gae_lambda=0.97)
    expected = 0.0
    for t in reversed(range(5000)):
        following = values[0, t + 1].item() if t < 4999 else 0.0
        expected = rewards[0, t].item() + following - values[0, t].item() + 0.97 * expected
        assert found.advantages_BT[0, t].item() == pytest.approx(expected, rel=1e-9, abs=1e-9)
