"""From groups to a plan and to a line of metrics."""

import dataclasses

import msgspec
import pytest

from shared.configuration import Configuration, RolloutSection, RunSection
from shared.ledger import TrainingLedger
from tests.trainer.learning import section
from tests.trainer.records import episode
from trainer.assembly import Group, Selection
from trainer.batching import SequenceCost
from trainer.lead import Batch, plan_batch, update_metrics
from trainer.learner import Learned
from trainer.measures import Measures
from trainer.pipeline import Stretch
from trainer.weight_push import PushTimes


@pytest.fixture
def configuration(tmp_path):
    return Configuration(
        run=RunSection(id="run", directory=str(tmp_path), model_path="model"),
        rollout=RolloutSection(rollout_batch_size=2, num_return_sequences_in_group=2),
        trainer=section(advantage={"scale_by_std": False}, ppo_max_token_len_per_gpu=20),
    )


def group(group_id, *, oldest_version=0, size=2, broken=()):
    episodes = tuple(
        episode(group_id, index, group_size=size, oldest_version=oldest_version, is_trainable=index not in broken)
        for index in range(size)
    )
    return Group(group_id, episodes)


def selected(*groups, oldest_version=0):
    return Selection(groups, oldest_version=oldest_version, stale=(), failed=(), awaited=())


def batch(configuration, selection, version=1):
    return Batch(
        selection.batch, plan_batch(selection, version, configuration, num_ranks=1, cost=SequenceCost()), wait_s=1.0, plan_s=0.5
    )


def test_advantages_are_relative_to_the_groups_own_trainable_episodes(configuration):
    plan = plan_batch(selected(group("a"), group("b", size=3, broken=(0,))), 4, configuration, num_ranks=1, cost=SequenceCost())
    planned = {row.entry_id: row.advantage for share in plan.shares for rows in share for row in rows}
    assert planned == {"a/0": -0.5, "a/1": 0.5, "b/1": -0.5, "b/2": 0.5}
    assert (plan.version, plan.num_sequences, plan.num_sampled_tokens) == (4, 4, 16)


def test_plan_survives_the_way_to_other_ranks(configuration):
    plan = plan_batch(selected(group("a"), group("b")), 4, configuration, num_ranks=2, cost=SequenceCost())
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=type(plan)) == plan


def test_metrics_of_an_update(configuration, redis_client, keys):
    ledger = TrainingLedger(redis_client, keys)
    subject = batch(configuration, selected(group("a", oldest_version=1), group("b", oldest_version=0)))
    measures = Measures(
        loss=0.1,
        clip_fraction=0.0,
        truncated_fraction=0.25,
        dropped_fraction=0.0,
        mean_weight=0.9,
        mean_ratio=1.0,
        effective_sample_size=1.0,
        kl_behaviour=0.0,
        kl_reference=0.02,
        logprob_mismatch_max=None,
        logprob_mismatch_mean=None,
    )
    learned = Learned(measures, kl_behaviour_before=0.05, kl_coefficient=0.001, grad_norm=2.0, learning_rate=1e-4)
    stretch = Stretch(num_updates=1, update_s=8.0, wait_s=1.0, train_s=2.0)
    metrics = update_metrics(subject, learned, PushTimes(0.3, 0.1, 0.06, 0.05), ledger.books(), stretch, fetch_s=0.25)
    assert (metrics.update, metrics.version, metrics.lag_max, metrics.lag_mean) == (2, 2, 1, 0.5)
    assert (metrics.kl_behaviour_before, metrics.discarded_groups) == (0.05, {})
    assert (metrics.correction_truncated_fraction, metrics.correction_mean_weight) == (0.25, 0.9)
    assert (metrics.kl_reference, metrics.kl_coefficient) == (0.02, 0.001)
    assert (metrics.reward_mean, metrics.success_rate) == (0.5, 0.5)
    assert (metrics.wait_prev_gen_s, metrics.assemble_s, metrics.train_s) == (1.0, 0.75, 2.0)
    assert (metrics.update_s, metrics.wait_share, metrics.trainer_idle_share) == (8.0, 0.125, 0.75)
    assert (metrics.tokens_by_lag, metrics.trajectories_by_lag) == ({0: 8, 1: 8}, {0: 2, 1: 2})
    assert (metrics.num_groups, metrics.num_trajectories, metrics.num_tokens, metrics.num_sampled_tokens) == (2, 4, 40, 16)


def test_tokens_over_the_bound_carry_no_loss_and_their_rewards_still_count(configuration):
    old, new = episode("g", 0, group_size=3, oldest_version=1), episode("g", 1, group_size=3, oldest_version=2)
    both = dataclasses.replace(episode("g", 2, group_size=3), sampled_by_version=((1, 3), (2, 1)))
    subject = batch(configuration, selected(Group("g", (old, new, both)), oldest_version=2), version=3)
    planned = {row.entry_id: row.advantage for share in subject.plan.shares for rows in share for row in rows}
    assert planned == {"g/1": 0.0, "g/2": 1.0}, "relative to the mean over all three"
    assert (subject.plan.num_sequences, subject.plan.num_sampled_tokens) == (2, 5)
    assert subject.lags == [1, 1]
    assert subject.trained_by_version == [(2, 4), (2, 1)]
    assert subject.unused_tokens == {"masked": 7, "no_reward": 0}


def planned_by(configuration, group, **trainer):
    configuration = msgspec.structs.replace(configuration, trainer=section(**trainer))
    plan = plan_batch(selected(group), 0, configuration, num_ranks=1, cost=SequenceCost())
    return {row.entry_id: row for share in plan.shares for rows in share for row in rows}


def test_an_estimator_of_turns_plans_an_advantage_for_each(configuration):
    turns = Group("g", (episode("g", 0, turn_rewards=(1.0, 2.0)), episode("g", 1, turn_rewards=(0.0,))))
    rows = planned_by(configuration, turns, adv_estimator="step_reinforce")
    # Returns 3, 2 and 0: mean 5/3, variance 7/3.
    assert rows["g/0"].turn_advantages == pytest.approx((4 / 3 / (7 / 3) ** 0.5, 1 / 3 / (7 / 3) ** 0.5), rel=1e-5)
    assert rows["g/1"].advantage == pytest.approx(-5 / 3 / (7 / 3) ** 0.5, rel=1e-5)


def test_an_estimator_of_tokens_plans_rewards(configuration):
    turns = Group("g", (episode("g", 0, turn_rewards=(1.0, 2.0)), episode("g", 1, turn_rewards=(1.0,))))
    rows = planned_by(configuration, turns, adv_estimator="reinforce_plus_plus")
    assert [row.turn_rewards for row in rows.values()] == [(1.0, 2.0), (1.0,)]
    rows = planned_by(configuration, turns, adv_estimator="reinforce_plus_plus_baseline")
    assert [row.turn_rewards for row in rows.values()] == [(1.0, 0.0), (-1.0,)], "less the group's mean of 2"
    assert {row.advantage for row in rows.values()} == {0.0}


def test_a_long_episode_pays_at_its_last_turn_and_is_reported_as_rewarded(configuration):
    # 4 sampled tokens are half-way through the buffer between 2 and 6.
    overlong = {"max_tokens": 6, "buffer_tokens": 4, "penalty": 2.0}
    turns = Group("g", (episode("g", 0, turn_rewards=(1.0, 2.0)), episode("g", 1, turn_rewards=(1.0,))))
    rows = planned_by(configuration, turns, adv_estimator="reinforce_plus_plus", advantage={"overlong": overlong})
    assert [row.turn_rewards for row in rows.values()] == [(1.0, 1.0), (0.0,)]
    assert [row.reward for row in rows.values()] == [3.0, 1.0]


def test_tokens_of_episodes_without_a_reward_are_counted(configuration):
    assert batch(configuration, selected(group("b", size=3, broken=(0,)))).unused_tokens == {"masked": 0, "no_reward": 4}
