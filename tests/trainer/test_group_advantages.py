"""Advantages from rewards by hand, against a slow loop, and what holds for all of them."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.group_advantages import (
    EpisodeRewards,
    discounted_returns,
    group_in_group,
    group_relative,
    leave_one_out,
    lite_ppo,
    overlong_penalty,
    step_reinforce,
)

EPS = 1e-6
REWARDS = st.lists(st.floats(-10, 10).map(lambda x: round(x, 3)), min_size=2, max_size=12).map(np.array)


def episode(*turn_rewards, states=None):
    return EpisodeRewards(turn_rewards, states or ("",) * len(turn_rewards))


def slow_std(values):
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def test_grpo_by_hand():
    # Mean 1/2; four deviations of 1/2, so the sample's variance is 4 · 1/4 / 3.
    advantages = group_relative(np.array([1.0, 0.0, 0.0, 1.0]), scale_by_std=True)
    np.testing.assert_allclose(advantages, np.array([0.5, -0.5, -0.5, 0.5]) / (np.sqrt(1 / 3) + EPS), rtol=1e-5)


def test_dr_grpo_by_hand():
    np.testing.assert_allclose(group_relative(np.array([3.0, 1.0, 2.0]), scale_by_std=False), [1.0, -1.0, 0.0], rtol=1e-5)


def test_rloo_by_hand():
    # Means of the others: (0 + 2) / 2, (6 + 2) / 2, (6 + 0) / 2.
    np.testing.assert_allclose(leave_one_out(np.array([6.0, 0.0, 2.0])), [5.0, -4.0, -1.0], rtol=1e-5)


def test_lite_ppo_by_hand():
    # Rewards 1, 0, 3, 3: mean 7/4, squared deviations 9/16 + 49/16 + 25/16 + 25/16 = 27/4, variance 9/4, std 3/2.
    first, second = lite_ppo([np.array([1.0, 0.0]), np.array([3.0, 3.0])])
    np.testing.assert_allclose(first, [1 / 3, -1 / 3], rtol=1e-5)
    np.testing.assert_allclose(second, [0.0, 0.0])


def test_step_reinforce_by_hand():
    # γ = 1/2. Returns [1 + 2/2, 2], [0 + 4/2, 4] and [0]: mean 2, squared deviations 4 + 4 over n - 1 = 4, std √2.
    episodes = [episode(1.0, 2.0), episode(0.0, 4.0), episode(0.0)]
    advantages = step_reinforce(episodes, discount=0.5)
    for actual, expected in zip(advantages, [[0.0, 0.0], [0.0, 2.0], [-2.0]], strict=True):
        np.testing.assert_allclose(actual, np.array(expected) / math.sqrt(2), rtol=1e-5, atol=1e-12)


def test_gigpo_by_hand():
    # Episode returns 3, 1: relative 1, -1. γ = 1/2; returns by turn: [0 + 3/2, 3] and [1, 0].
    # State s: 1.5 and 1 and 0, mean 5/6; state x: one turn alone.
    group = [episode(0.0, 3.0, states=("s", "x")), episode(1.0, 0.0, states=("s", "s"))]
    first, second = group_in_group(group, discount=0.5, scale_by_std=False, episode_weight=1.0, step_weight=0.5)
    np.testing.assert_allclose(first, [1 + 0.5 * (1.5 - 5 / 6), 1.0], rtol=1e-5)
    np.testing.assert_allclose(second, [-1 + 0.5 * (1 - 5 / 6), -1 + 0.5 * (0 - 5 / 6)], rtol=1e-5)


def test_gigpo_scales_both_terms_by_their_own_std():
    group = [episode(0.0, 4.0, states=("s", "x")), episode(2.0, 0.0, states=("s", "y"))]
    first, second = group_in_group(group, discount=1.0, scale_by_std=True, episode_weight=2.0, step_weight=1.0)
    # Episodes 4, 2 and the returns in s, 4 and 2: both have std √2 and deviations ± 1.
    np.testing.assert_allclose(first, [3 / math.sqrt(2), 2 / math.sqrt(2)], rtol=1e-5)
    np.testing.assert_allclose(second, [-3 / math.sqrt(2), -2 / math.sqrt(2)], rtol=1e-5)


def test_gigpo_does_not_compare_turns_of_unknown_state():
    group = [episode(1.0, 1.0), episode(0.0, 0.0)]
    advantages = group_in_group(group, discount=1.0, scale_by_std=False, episode_weight=0.0, step_weight=1.0)
    np.testing.assert_array_equal(np.concatenate(advantages), np.zeros(4))


def test_overlong_penalty_by_hand():
    lengths = [0, 60, 80, 90, 100, 1000]
    penalties = [overlong_penalty(length, max_tokens=100, buffer_tokens=20, penalty=2.0) for length in lengths]
    np.testing.assert_allclose(penalties, [0.0, 0.0, 0.0, -1.0, -2.0, -2.0], rtol=1e-5)


@pytest.mark.parametrize("formula", [lambda r: group_relative(r, scale_by_std=True), leave_one_out, lambda r: lite_ppo([r])[0]])
def test_a_group_of_one_is_refused(formula):
    with pytest.raises(ValueError, match="at least 2 rollouts in a group, got 1"):
        formula(np.array([1.0]))


def test_equal_rewards_teach_nothing():
    assert np.abs(group_relative(np.full(8, 0.1), scale_by_std=True)).max() < 1e-9


@given(REWARDS)
def test_formulas_equal_slow_loops(rewards):
    mean, std = math.fsum(rewards) / len(rewards), slow_std(rewards)
    np.testing.assert_allclose(
        group_relative(rewards, scale_by_std=True), [(reward - mean) / (std + EPS) for reward in rewards], rtol=1e-5, atol=1e-9
    )
    others = [math.fsum(rewards[j] for j in range(len(rewards)) if j != i) / (len(rewards) - 1) for i in range(len(rewards))]
    np.testing.assert_allclose(leave_one_out(rewards), rewards - np.array(others), rtol=1e-5, atol=1e-9)


@given(st.lists(REWARDS, min_size=1, max_size=4))
def test_lite_ppo_equals_a_slow_loop(groups):
    std = slow_std([reward for group in groups for reward in group])
    for actual, group in zip(lite_ppo(groups), groups, strict=True):
        expected = [(reward - math.fsum(group) / len(group)) / (std + EPS) for reward in group]
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-9)


@given(REWARDS)
def test_grpo_and_rloo_agree_with_torch(rewards):
    tensor = torch.from_numpy(rewards)
    expected = (tensor - tensor.mean()) / (tensor.std() + EPS)
    np.testing.assert_allclose(group_relative(rewards, scale_by_std=True), expected, rtol=1e-5, atol=1e-9)
    others = torch.stack([torch.cat([tensor[:i], tensor[i + 1 :]]).mean() for i in range(len(tensor))])
    np.testing.assert_allclose(leave_one_out(rewards), tensor - others, rtol=1e-5, atol=1e-9)


FORMULAS = {
    "grpo": lambda rewards: group_relative(rewards, scale_by_std=True),
    "dr_grpo": lambda rewards: group_relative(rewards, scale_by_std=False),
    "rloo": leave_one_out,
    "lite_ppo": lambda rewards: lite_ppo([rewards, np.array([0.0, 7.0])])[0],
}


@pytest.mark.parametrize("name", FORMULAS)
@given(rewards=REWARDS)
def test_advantages_of_a_group_sum_to_zero(name, rewards):
    assert abs(FORMULAS[name](rewards).sum()) < 1e-8


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
@given(rewards=REWARDS, shift=st.floats(-100, 100))
def test_a_constant_in_all_rewards_changes_nothing(name, rewards, shift):
    np.testing.assert_allclose(FORMULAS[name](rewards + shift), FORMULAS[name](rewards), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", FORMULAS)
@given(rewards=REWARDS, seed=st.integers(0, 2**32 - 1))
def test_order_of_siblings_does_not_matter(name, rewards, seed):
    order = np.random.default_rng(seed).permutation(len(rewards))
    np.testing.assert_allclose(FORMULAS[name](rewards[order]), FORMULAS[name](rewards)[order], rtol=1e-9, atol=1e-9)


EPISODES = st.lists(
    st.lists(st.tuples(st.sampled_from([-1.0, 0.0, 0.5, 1.0]), st.sampled_from(["", "a", "b", "c"])), min_size=1, max_size=5).map(
        lambda turns: EpisodeRewards(tuple(turn[0] for turn in turns), tuple(turn[1] for turn in turns))
    ),
    min_size=2,
    max_size=5,
)


def slow_return(rewards, k, discount):
    return math.fsum(discount ** (j - k) * rewards[j] for j in range(k, len(rewards)))


@given(EPISODES, st.sampled_from([0.0, 0.5, 1.0]))
def test_gigpo_equals_a_slow_loop(group, discount):
    turns = [(i, k) for i, each in enumerate(group) for k in range(len(each.turn_rewards))]
    returns = {(i, k): slow_return(group[i].turn_rewards, k, discount) for i, k in turns}
    totals = [math.fsum(each.turn_rewards) for each in group]
    actual = group_in_group(group, discount=discount, scale_by_std=True, episode_weight=0.7, step_weight=1.3)
    for i, k in turns:
        state = group[i].state_fingerprints[k]
        alike = [returns[place] for place in turns if state and group[place[0]].state_fingerprints[place[1]] == state]
        step = (returns[i, k] - math.fsum(alike) / len(alike)) / (slow_std(alike) + EPS) if len(alike) > 1 else 0.0
        whole = (totals[i] - math.fsum(totals) / len(totals)) / (slow_std(totals) + EPS)
        assert actual[i][k] == pytest.approx(0.7 * whole + 1.3 * step, rel=1e-5, abs=1e-8)


@given(EPISODES, st.sampled_from([0.0, 0.9, 1.0]))
def test_step_reinforce_equals_a_slow_loop(episodes, discount):
    returns = [[slow_return(each.turn_rewards, k, discount) for k in range(len(each.turn_rewards))] for each in episodes]
    every = [value for each in returns for value in each]
    mean, std = math.fsum(every) / len(every), slow_std(every)
    for actual, expected in zip(step_reinforce(episodes, discount=discount), returns, strict=True):
        np.testing.assert_allclose(actual, [(value - mean) / (std + EPS) for value in expected], rtol=1e-5, atol=1e-8)


def test_a_batch_of_one_turn_has_nothing_to_be_normalised_by():
    np.testing.assert_array_equal(step_reinforce([episode(3.0)], discount=1.0)[0], [0.0])


def test_returns_leave_the_rewards_alone():
    rewards = np.array([1.0, 1.0])
    np.testing.assert_array_equal(discounted_returns(rewards, discount=1.0), [2.0, 1.0])
    np.testing.assert_array_equal(rewards, [1.0, 1.0])
