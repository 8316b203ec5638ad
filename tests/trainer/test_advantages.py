"""Estimators by name: what the plan of each says of a batch, and which names and settings are refused."""

import dataclasses
import math

import numpy as np
import pytest

from shared import advantage_settings
from shared.advantage_settings import AdvantageSection
from shared.errors import ConfigurationError, TrainingError
from tests.trainer.learning import section
from trainer.advantages import ADVANTAGE_ESTIMATORS, advantage_estimator, planned_scores
from trainer.group_advantages import EpisodeRewards

PLANNED = sorted(set(ADVANTAGE_ESTIMATORS) - set(advantage_settings.TOKEN_LEVEL_ESTIMATORS))


def episode(*turn_rewards, state="s"):
    return EpisodeRewards(turn_rewards, (state,) * len(turn_rewards))


def plan(name, groups, **settings):
    scores = ADVANTAGE_ESTIMATORS[name].plan(groups, AdvantageSection(**settings))
    return [[turns_K.tolist() for turns_K in group] for group in scores]


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("grpo", {"scale_by_std": False}, [[[-1.0], [1.0]], [[0.0], [0.0]]]),
        ("rloo", {}, [[[-2.0], [2.0]], [[0.0], [0.0]]]),
        ("reinforce_plus_plus", {}, [[[1.0, 1.0], [4.0]], [[2.0], [2.0]]]),
        ("reinforce_plus_plus_baseline", {}, [[[1.0, -2.0], [1.0]], [[0.0], [0.0]]]),
        ("gae", {}, [[[1.0, 1.0], [4.0]], [[2.0], [2.0]]]),
        # Steps: returns 2, 1 | 4 of mean 7/3 in one state; episodes -1 | 1.
        ("gigpo", {"scale_by_std": False}, [[[-4 / 3, -7 / 3], [8 / 3]], [[0.0], [0.0]]]),
    ],
)
def test_plan_of_a_batch_by_hand(name, settings, expected):
    scores = plan(name, [[episode(1.0, 1.0), episode(4.0)], [episode(2.0), episode(2.0)]], **settings)
    for group, wanted in zip(scores, expected, strict=True):
        for turns, numbers in zip(group, wanted, strict=True):
            np.testing.assert_allclose(turns, numbers, rtol=1e-5, atol=1e-12)


def test_lite_ppo_scales_all_groups_by_one_std():
    scores = plan("lite_ppo", [[episode(1.0), episode(0.0)], [episode(3.0), episode(3.0)]])
    np.testing.assert_allclose(scores[0], [[1 / 3], [-1 / 3]], rtol=1e-5)


def test_step_reinforce_normalises_over_the_turns_of_all_groups():
    scores = plan("step_reinforce", [[episode(1.0, 2.0)], [episode(0.0, 4.0), episode(0.0)]], discount=0.5)
    assert scores[0] == [[0.0, 0.0]]
    np.testing.assert_allclose(scores[1][0], [0.0, math.sqrt(2)], rtol=1e-5)
    np.testing.assert_allclose(scores[1][1], [-math.sqrt(2)], rtol=1e-5)


@pytest.mark.parametrize("name", advantage_settings.GROUP_ESTIMATORS)
def test_a_group_of_one_is_refused_and_never_its_raw_reward(name):
    with pytest.raises(ValueError, match="at least 2 rollouts in a group, got 1"):
        plan(name, [[episode(1.0)], [episode(0.0), episode(2.0)]])


@pytest.mark.parametrize("name", PLANNED)
def test_order_of_groups_does_not_matter(name):
    groups = [[episode(1.0, 1.0), episode(4.0)], [episode(2.0), episode(0.5)]]
    scores = [turns for group in plan(name, groups) for turns in group]
    reversed_scores = [turns for group in plan(name, groups[::-1])[::-1] for turns in group]
    np.testing.assert_allclose(np.concatenate(reversed_scores), np.concatenate(scores), rtol=1e-9, atol=1e-12)


def test_configuration_knows_what_the_estimators_need():
    assert set(ADVANTAGE_ESTIMATORS) == set(advantage_settings.ESTIMATORS)
    for name, estimator in ADVANTAGE_ESTIMATORS.items():
        assert (estimator.by_token is not None) == (name in advantage_settings.TOKEN_LEVEL_ESTIMATORS)
        assert (estimator.min_group_size == 2) == (name in advantage_settings.GROUP_ESTIMATORS)
        assert estimator.needs_critic == (name in advantage_settings.CRITIC_ESTIMATORS)


OWN = {"adv_estimator": "tests.trainer.own_estimator:best", "import_allowlist": ["tests"]}


def test_ones_own_estimator_is_found_by_import_path():
    (scores,) = advantage_estimator(section(**OWN)).plan([[episode(1.0), episode(3.0)]], AdvantageSection())
    assert [turns_K.tolist() for turns_K in scores] == [[0.0], [1.0]]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tests.nowhere:best", "can be imported, and 'tests.nowhere:best' cannot: ModuleNotFoundError"),
        ("tests.trainer.own_estimator:worst", "cannot: AttributeError"),
        ("tests.trainer.own_estimator:NOT_ONE", "must name an AdvantageEstimator, and .* is of type int"),
        ("os:environ", r"must be inside trainer.import_allowlist \(tests\), got 'os:environ'"),
    ],
)
def test_what_is_no_estimator_is_refused(name, message):
    with pytest.raises(ConfigurationError, match=message):
        advantage_estimator(section(adv_estimator=name, import_allowlist=["tests"]))


def test_ones_own_estimator_is_held_to_what_it_says_it_needs(monkeypatch):
    with pytest.raises(ConfigurationError, match=r"trainer.critic must not be given with adv_estimator .*, got one"):
        advantage_estimator(section(**OWN, critic={}))
    with pytest.raises(ConfigurationError, match=r"trainer.kl.place must be 'loss'"):
        advantage_estimator(section(**OWN, kl={"coefficient": 0.1, "place": "reward"}))
    estimator = advantage_estimator(section(**OWN))
    monkeypatch.setattr("tests.trainer.own_estimator.best", dataclasses.replace(estimator, needs_critic=True))
    with pytest.raises(ConfigurationError, match=r"trainer.critic must be given with adv_estimator .*, got none"):
        advantage_estimator(section(**OWN))


def test_a_plan_that_does_not_fit_its_episodes_stops_training():
    trainer = section(**OWN | {"adv_estimator": "tests.trainer.own_estimator:too_few"})
    with pytest.raises(TrainingError, match=r"own_estimator:too_few must plan .* \[\[2, 1\]\] by group, got shapes \[\[\(1,\)\]\]"):
        planned_scores([[episode(1.0, 1.0), episode(3.0)]], trainer)
