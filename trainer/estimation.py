"""Advantages of the tokens of one update, on every rank: the second half of an estimator, whitening and clipping.

Shapes: B sequences, T tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from shared.configuration import TrainerSection
from shared.errors import TrainingError
from trainer import ranks
from trainer.advantages import advantage_estimator
from trainer.batching import MicroBatchPlan
from trainer.critic import ValueTargets
from trainer.micro_batch import MicroBatch
from trainer.token_advantages import normalised, rewards_at_turn_ends


@dataclass(frozen=True)
class Scored:
    """One micro-batch before its advantages are known."""

    planned: MicroBatchPlan
    rows: MicroBatch
    """With the plan's scores as advantages, where those are advantages."""
    reward_penalties_BT: Tensor | None
    """To take off the rewards of tokens."""
    values_BT: Tensor | None
    """None without a critic."""


@dataclass(frozen=True)
class Estimated:
    """The same micro-batch with them."""

    advantages_BT: Tensor
    """float32, of the tokens that carry loss."""
    targets: ValueTargets | None


class TokenEstimation:
    """Knows the estimator, and asks nothing of the size or order of micro-batches."""

    def __init__(self, trainer: TrainerSection) -> None:
        self._estimator = advantage_estimator(trainer)
        self._name = trainer.adv_estimator
        self._settings = trainer.advantage

    def estimate(self, batches: Sequence[Scored]) -> list[Estimated]:
        """Args: batches: all of this rank's. A collective where anything is normalised.

        Raises: TrainingError if an estimator of a user's own gives tensors of another shape.
        """
        advantages: list[Tensor] = []
        targets: list[ValueTargets | None] = []
        for batch in batches:
            advantages_BT, target = self._estimate_one(batch)
            advantages.append(advantages_BT)
            targets.append(target)
        if self._estimator.is_normalised or self._settings.whiten:
            masks = [batch.rows.loss_mask_BT for batch in batches]
            advantages = normalised(advantages, masks, sum_over_ranks=ranks.sum_in_place)
        if (limit := self._settings.clip) is not None:
            advantages = [part.clamp(-limit, limit) for part in advantages]
        return [Estimated(part.float(), target) for part, target in zip(advantages, targets, strict=True)]

    def _estimate_one(self, batch: Scored) -> tuple[Tensor, ValueTargets | None]:
        rows = batch.rows
        if self._estimator.by_token is None:
            return rows.advantages_BT, None
        scores = [sequence.turn_rewards for sequence in batch.planned]
        rewards_BT = rewards_at_turn_ends(scores, rows.turn_index_BT, rows.is_sampled_BT)
        if batch.reward_penalties_BT is not None:
            rewards_BT = rewards_BT - batch.reward_penalties_BT.double()
        found = self._estimator.by_token(rewards_BT, batch.values_BT, rows.is_sampled_BT, self._settings)
        if found.advantages_BT.shape != rewards_BT.shape or found.returns_BT.shape != rewards_BT.shape:
            raise TrainingError(
                f"{self._name} must give advantages and returns of the shape of the token rewards, {list(rewards_BT.shape)}, got "
                f"{list(found.advantages_BT.shape)} and {list(found.returns_BT.shape)}; see trainer/advantages.py"
            )
        target = None if batch.values_BT is None else ValueTargets(batch.values_BT, found.returns_BT.float())
        return found.advantages_BT, target
