"""Advantage estimators by name, and the two places where their formulas run.

    groups ──plan──► a score by episode or turn ──ranks──► [by_token] ──► whiten ──► clip ──► the loss

1. `plan` runs on rank 0 when it has chosen the groups of an update: it sees all rewards of the batch and no token.
2. `by_token` runs on every rank in the preparation (`trainer/preparation.py`), where rewards by token, KL and values are. An
   estimator without it is done after its plan: its scores are the advantages of the tokens of that episode or turn. With it, the
   scores are rewards.

Formulas are in `group_advantages` and `token_advantages`; here each gets a name. An estimator of one's own is an
AdvantageEstimator that the run file names by import path.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import numpy as np
from torch import Tensor

from shared.advantage_settings import AdvantageSection
from shared.configuration import TrainerSection
from shared.errors import ConfigurationError, TrainingError
from trainer import group_advantages, named, token_advantages
from trainer.group_advantages import Array, EpisodeRewards
from trainer.token_advantages import TokenAdvantages

Groups = Sequence[Sequence[EpisodeRewards]]
"""All groups of a batch."""
Scores = list[list[Array]]
"""For each episode of each group, a score for each of its turns, [K], or one for the whole episode, [1]."""


class Plan(Protocol):
    def __call__(self, groups: Groups, settings: AdvantageSection) -> Scores: ...


class ByToken(Protocol):
    """Args: rewards_BT: float64. values_BT: None without a critic. mask_BT: bool, the sampled tokens."""

    def __call__(
        self, rewards_BT: Tensor, values_BT: Tensor | None, mask_BT: Tensor, settings: AdvantageSection
    ) -> TokenAdvantages: ...


class GroupFormula(Protocol):
    """[G] advantages from the [G] rewards of one group."""

    def __call__(self, rewards_G: Array, settings: AdvantageSection) -> Array: ...


@dataclass(frozen=True)
class AdvantageEstimator:
    """One way to turn rewards into advantages."""

    plan: Plan
    by_token: ByToken | None = None
    min_group_size: int = 1
    """Episodes that a group must have to be trained on; 2 where siblings are compared."""
    is_normalised: bool = False
    """Over the sampled tokens of the whole batch, whatever `whiten` says."""
    needs_critic: bool = False


def advantage_estimator(trainer: TrainerSection) -> AdvantageEstimator:
    """The estimator that the run file names.

    Raises: ConfigurationError if there is none of that name, or it does not fit the settings of KL and critic.
    """
    name = trainer.adv_estimator
    estimator = ADVANTAGE_ESTIMATORS[name] if name in ADVANTAGE_ESTIMATORS else _own(name, trainer.import_allowlist)
    if estimator.needs_critic != (trainer.critic is not None):
        wanted, found = ("be given", "none") if estimator.needs_critic else ("not be given", "one")
        raise ConfigurationError(f"trainer.critic must {wanted} with adv_estimator {name!r}, got {found}")
    if estimator.by_token is None and trainer.kl.is_in_reward:
        raise ConfigurationError(
            f"trainer.kl.place must be 'loss' with adv_estimator {name!r}, which has no rewards of tokens, got 'reward'"
        )
    return estimator


def planned_scores(groups: Groups, trainer: TrainerSection) -> Scores:
    """The estimator's plan of a batch.

    Raises: TrainingError unless an episode of K turns gets [1] or [K] scores, which one of a user's own may forget.
    """
    scores = advantage_estimator(trainer).plan(groups, trainer.advantage)
    turns = [[len(episode.turn_rewards) for episode in group] for group in groups]
    shapes = [[np.shape(scores_K) for scores_K in group] for group in scores]
    is_complete = [len(group) for group in shapes] == [len(group) for group in turns]
    flat = zip(chain.from_iterable(shapes), chain.from_iterable(turns), strict=False)
    if not is_complete or any(shape not in ((1,), (num_turns,)) for shape, num_turns in flat):
        raise TrainingError(
            f"{trainer.adv_estimator} must plan a score for each episode, [1], or for each of its turns, {turns} by group, got "
            f"shapes {shapes}; see trainer/advantages.py"
        )
    return scores


def _own(import_path: str, import_allowlist: Sequence[str]) -> AdvantageEstimator:
    key, noun = "trainer.adv_estimator", "an AdvantageEstimator"
    estimator = named.imported(import_path, key=key, noun=noun, import_allowlist=import_allowlist)
    if not isinstance(estimator, AdvantageEstimator):
        raise ConfigurationError(
            f"{key} must name {noun}, and {import_path!r} is of type {type(estimator).__name__}; see trainer/advantages.py"
        )
    return estimator


def by_group(formula: GroupFormula) -> Plan:
    """A plan that looks at the rewards of one group at a time."""

    def plan(groups: Groups, settings: AdvantageSection) -> Scores:
        return [_singly(formula(totals(group), settings)) for group in groups]

    return plan


def rewards(groups: Groups, settings: AdvantageSection) -> Scores:
    """The rewards themselves, by turn: an estimator of tokens does the rest."""
    return [[np.array(episode.turn_rewards) for episode in group] for group in groups]


def centred_rewards(groups: Groups, settings: AdvantageSection) -> Scores:
    """Rewards by turn, with the group's mean taken off the last: the baseline of REINFORCE++-baseline, arXiv:2501.03262."""
    scores = rewards(groups, settings)
    for group, episodes in zip(groups, scores, strict=True):
        baseline = group_advantages.group_mean(totals(group))
        for turns_K in episodes:
            turns_K[-1] -= baseline
    return scores


def totals(group: Sequence[EpisodeRewards]) -> Array:
    """[G] rewards of whole episodes."""
    return np.array([episode.total for episode in group])


def _lite_ppo(groups: Groups, settings: AdvantageSection) -> Scores:
    return [_singly(advantages_G) for advantages_G in group_advantages.lite_ppo([totals(group) for group in groups])]


def _gigpo(groups: Groups, settings: AdvantageSection) -> Scores:
    return [
        group_advantages.group_in_group(
            group,
            discount=settings.discount,
            scale_by_std=settings.scale_by_std,
            episode_weight=settings.episode_weight,
            step_weight=settings.step_weight,
        )
        for group in groups
    ]


def _step_reinforce(groups: Groups, settings: AdvantageSection) -> Scores:
    episodes = [episode for group in groups for episode in group]
    advantages = iter(group_advantages.step_reinforce(episodes, discount=settings.discount))
    return [[next(advantages) for _ in group] for group in groups]


def _returns(rewards_BT: Tensor, values_BT: Tensor | None, mask_BT: Tensor, settings: AdvantageSection) -> TokenAdvantages:
    returns_BT = token_advantages.discounted_returns(rewards_BT, mask_BT, discount=settings.discount)
    return TokenAdvantages(returns_BT, returns_BT)


def _gae(rewards_BT: Tensor, values_BT: Tensor | None, mask_BT: Tensor, settings: AdvantageSection) -> TokenAdvantages:
    assert values_BT is not None, "an estimator that needs a critic is refused without one"
    return token_advantages.generalised_advantages(
        rewards_BT, values_BT, mask_BT, discount=settings.discount, gae_lambda=settings.gae_lambda
    )


def _singly(scores_G: Array) -> list[Array]:
    return [np.array([score]) for score in scores_G]


ADVANTAGE_ESTIMATORS: Mapping[str, AdvantageEstimator] = {
    "grpo": AdvantageEstimator(
        by_group(lambda rewards_G, settings: group_advantages.group_relative(rewards_G, scale_by_std=settings.scale_by_std)),
        min_group_size=2,
    ),
    "rloo": AdvantageEstimator(by_group(lambda rewards_G, settings: group_advantages.leave_one_out(rewards_G)), min_group_size=2),
    "lite_ppo": AdvantageEstimator(_lite_ppo, min_group_size=2),
    "gigpo": AdvantageEstimator(_gigpo, min_group_size=2),
    "step_reinforce": AdvantageEstimator(_step_reinforce),
    "reinforce_plus_plus": AdvantageEstimator(rewards, _returns, is_normalised=True),
    "reinforce_plus_plus_baseline": AdvantageEstimator(centred_rewards, _returns, min_group_size=2, is_normalised=True),
    "gae": AdvantageEstimator(rewards, _gae, needs_critic=True),
}
