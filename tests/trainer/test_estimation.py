"""Advantages of an update's tokens, from planned rewards to what the loss multiplies, by hand."""

import math

import numpy as np
import pytest
import torch

from shared.errors import TrainingError
from shared.trajectory import Turn
from tests.trainer.learning import section
from tests.trainer.records import trajectory
from trainer.batching import PlannedSequence
from trainer.estimation import Scored, TokenEstimation
from trainer.micro_batch import collate

CPU = torch.device("cpu")
EPS = 1e-6


def scored(planned, rows, *, penalties=None, values=None, oldest_version=0):
    batch = collate(rows, planned, version=0, oldest_version=oldest_version, device=CPU)
    return Scored(tuple(planned), batch, penalties, values)


def rewarded(row, *turn_rewards):
    return PlannedSequence("e", row.num_tokens, row.num_sampled_tokens, sum(turn_rewards), 0.0, turn_rewards=turn_rewards)


def two_turns(**settings):
    """Sampled at 1, 2 and 4, with an observation at 3."""
    return trajectory([0, 1, 1, 0, 1], turns=[Turn(1, 3, 0.0, (), "a"), Turn(4, 5, 0.0, (), "b")], **settings)


def short():
    return trajectory([0, 1], turns=[Turn(1, 2, 0.0, (), "a")])


def test_reinforce_plus_plus_by_hand(one_rank):
    """γ = 1/2; KL penalties 0, 1, 2 of the first episode, none of the second."""
    estimation = TokenEstimation(section(adv_estimator="reinforce_plus_plus", advantage={"discount": 0.5}))
    first, second = two_turns(), short()
    batches = [
        scored([rewarded(first, 3.0, 6.0)], [first], penalties=torch.tensor([[0.0, 0.0, 1.0, 0.0, 2.0]])),
        scored([rewarded(second, 1.0)], [second], penalties=torch.zeros(1, 2)),
    ]
    # Token rewards 0, 3 - 1, 6 - 2 make returns 2, 4, 4; with the other's 1 the mean is 11/4 and the variance 27/12.
    found = estimation.estimate(batches)
    std = math.sqrt(27 / 12) + EPS
    np.testing.assert_allclose(found[0].advantages_BT, [[0, -0.75 / std, 1.25 / std, 0, 1.25 / std]], rtol=1e-5)
    np.testing.assert_allclose(found[1].advantages_BT, [[0, -1.75 / std]], rtol=1e-5)
    assert [each.targets for each in found] == [None, None]


def test_gae_by_hand_gives_the_critic_its_returns(one_rank):
    """γ = λ = 1/2, as test_gae_by_hand of the formula."""
    estimation = TokenEstimation(section(adv_estimator="gae", critic={}, advantage={"discount": 0.5, "gae_lambda": 0.5}))
    row = two_turns()
    values = torch.tensor([[0.0, 1.0, 2.0, 0.0, 4.0]])
    (found,) = estimation.estimate([scored([rewarded(row, 0.0, 8.0)], [row], values=values)])
    np.testing.assert_allclose(found.advantages_BT, [[0, 0.25, 1, 0, 4]], rtol=1e-5)
    np.testing.assert_allclose(found.targets.returns_BT, [[0, 1.25, 3, 0, 8]], rtol=1e-5)
    assert found.targets.values_BT is values
    assert found.advantages_BT.dtype == found.targets.returns_BT.dtype == torch.float32


def test_tokens_too_old_for_the_loss_are_steps_and_take_no_part_in_the_mean(one_rank):
    estimation = TokenEstimation(section(adv_estimator="reinforce_plus_plus"))
    old, new = short(), two_turns(version=2)
    batch = scored([rewarded(old, 100.0), rewarded(new, 1.0, 1.0)], [old, new], oldest_version=1)
    (found,) = estimation.estimate([batch])
    # Returns 2, 2 and 1 of the new one: mean 5/3, variance 1/3.
    std = math.sqrt(1 / 3) + EPS
    np.testing.assert_allclose(
        found.advantages_BT, [[0, 0, 0, 0, 0], [0, 1 / 3 / std, 1 / 3 / std, 0, -2 / 3 / std]], rtol=1e-5, atol=1e-9
    )


def test_a_plans_own_advantages_stay_as_they_are(one_rank):
    row = two_turns()
    planned = PlannedSequence("e", row.num_tokens, row.num_sampled_tokens, 0.0, 0.0, turn_advantages=(0.1, -7.0))
    (found,) = TokenEstimation(section()).estimate([scored([planned], [row])])
    np.testing.assert_array_equal(found.advantages_BT, np.float32([[0, 0.1, 0.1, 0, -7.0]]))


def test_a_plans_own_advantages_are_whitened_by_token_then_clipped(one_rank):
    row = two_turns()
    planned = PlannedSequence("e", row.num_tokens, row.num_sampled_tokens, 0.0, 0.0, turn_advantages=(1.0, 4.0))
    estimation = TokenEstimation(section(advantage={"whiten": True, "clip": 1.0}))
    (found,) = estimation.estimate([scored([planned], [row])])
    # 1, 1, 4: mean 2, variance 6/2; 2/√3 is over the limit.
    np.testing.assert_allclose(found.advantages_BT, [[0, -1 / math.sqrt(3), -1 / math.sqrt(3), 0, 1.0]], rtol=1e-5)


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "reinforce_plus_plus_baseline", "grpo"])
def test_an_empty_micro_batch_changes_nothing(one_rank, name):
    estimation = TokenEstimation(section(adv_estimator=name, advantage={"whiten": True}))
    row = two_turns()
    planned = PlannedSequence("e", row.num_tokens, row.num_sampled_tokens, 0.0, 0.0, (1.0, 4.0), (1.0, 4.0))
    (alone,) = estimation.estimate([scored([planned], [row])])
    beside, empty = estimation.estimate([scored([planned], [row]), scored([], [])])
    np.testing.assert_array_equal(beside.advantages_BT, alone.advantages_BT)
    assert not empty.advantages_BT.any()


def test_an_estimator_of_ones_own_with_other_shapes_stops_training(one_rank):
    estimation = TokenEstimation(section(adv_estimator="tests.trainer.own_estimator:of_sequences", import_allowlist=["tests"]))
    row = two_turns()
    with pytest.raises(TrainingError, match=r"of_sequences must give .* \[1, 5\], got \[1\] and \[1\]"):
        estimation.estimate([scored([rewarded(row, 1.0, 1.0)], [row])])
