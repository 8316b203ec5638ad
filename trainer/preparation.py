"""What an update needs once, before its first epoch, and without gradient.

    collate → score (reference, proximal, values) → token rewards → advantages → mean weight of the correction

The proximal policy is the one that the update begins with. With one step an update the policy in the loss *is* the proximal
policy, so nothing is scored for it unless something needs its log-probabilities before that step.

Shapes: B sequences, T tokens.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import deepspeed
import torch
from torch import Tensor

from shared.configuration import TrainerSection
from shared.trajectory import Trajectory
from trainer import ranks
from trainer.batching import BatchPlan, MicroBatchPlan, Share
from trainer.corrections import correct
from trainer.critic import Critic, ValueTargets
from trainer.estimation import Scored, TokenEstimation
from trainer.kl import KL_ESTIMATORS, KlController, clamped_log_ratio
from trainer.losses import POLICY_LOSSES
from trainer.micro_batch import MicroBatch, collate
from trainer.reference import ReferencePolicy


@dataclass(frozen=True)
class Prepared:
    """One micro-batch, for all epochs of the update."""

    entry_ids: tuple[str, ...]
    """Of its sequences; rows beyond them are padding."""
    rows: MicroBatch
    """With the advantages that the loss uses."""
    proximal_logprobs_BT: Tensor | None
    """log π_prox of the tokens that carry loss. None: the policy in the loss is the proximal one."""
    reference_logprobs_BT: Tensor | None
    """log π_ref of the tokens that carry loss. None: no reference policy."""
    reward_penalties_BT: Tensor | None
    """β · KL(π_prox ‖ π_ref) of the tokens that carry loss, to take off their rewards. None: the KL is in the loss, if at all."""
    mean_weight: float
    """What the correction's weights are divided by; the same for all micro-batches and ranks."""
    value_targets: ValueTargets | None = None
    """What the critic learns from it. None: no critic."""


class Preparation:
    """Scores a rank's share of a batch. Every rank prepares as many micro-batches, so that sharded models may gather."""

    def __init__(
        self,
        engine: deepspeed.DeepSpeedEngine,
        trainer: TrainerSection,
        *,
        reference: ReferencePolicy | None,
        controller: KlController,
        critic: Critic | None = None,
    ) -> None:
        """Args: controller: of the KL penalty's β; without a reference it is not asked."""
        self._engine = engine
        self._critic = critic
        self._estimation = TokenEstimation(trainer)
        self._kl = trainer.kl
        self._correction = trainer.correction
        self._controller = controller
        self._trainer = trainer
        self._reference = reference

    @torch.no_grad()
    def prepare(self, plan: BatchPlan, trajectories: Mapping[str, Trajectory]) -> list[Prepared]:
        """This rank's micro-batches of `plan`, in its order. A collective. Args: trajectories: by entry id."""
        share = plan.shares[ranks.rank()]
        batches = [
            collate(
                [trajectories[sequence.entry_id] for sequence in planned],
                planned,
                version=plan.version,
                oldest_version=plan.oldest_version,
                device=self._engine.device,
            )
            for planned in share
        ]
        with ExitStack() as stack:
            if self._reference:
                stack.enter_context(self._reference.scoring())
            has_proximal = needs_proximal(self._trainer, num_steps=self._trainer.ppo_epochs * len(plan.steps))
            prepared = [self._score(planned, rows, has_proximal=has_proximal) for planned, rows in zip(share, batches, strict=True)]
        prepared = self._with_advantages(prepared, share)
        if self._correction.batch_normalise:
            mean_weight = self._mean_weight(prepared, plan)
            prepared = [replace(each, mean_weight=mean_weight) for each in prepared]
        return prepared

    def _score(self, planned: MicroBatchPlan, rows: MicroBatch, *, has_proximal: bool) -> Prepared:
        entries = tuple(sequence.entry_id for sequence in planned)
        proximal_BT = self.score(rows) if has_proximal else None
        reference_BT = self._reference.logprobs(rows) if self._reference else None
        return Prepared(
            entries, rows, proximal_BT, reference_BT, self._reward_penalties(proximal_BT, reference_BT), mean_weight=1.0
        )

    def _with_advantages(self, prepared: Sequence[Prepared], share: Share) -> list[Prepared]:
        scored = [
            Scored(planned, each.rows, each.reward_penalties_BT, self._critic.values(each.rows) if self._critic else None)
            for planned, each in zip(share, prepared, strict=True)
        ]
        return [
            replace(
                each,
                rows=replace(each.rows, advantages_BT=estimated.advantages_BT),
                value_targets=estimated.targets,
            )
            for each, estimated in zip(prepared, self._estimation.estimate(scored), strict=True)
        ]

    def _reward_penalties(self, proximal_BT: Tensor | None, reference_BT: Tensor | None) -> Tensor | None:
        if proximal_BT is None or reference_BT is None or not self._kl.is_in_reward:
            return None
        return self._controller.coefficient * KL_ESTIMATORS[self._kl.estimator](clamped_log_ratio(reference_BT, proximal_BT))

    @torch.no_grad()
    def score(self, rows: MicroBatch) -> Tensor:
        """log π_θ as the weights are, of the tokens that carry loss, [B, T] float32, 0 elsewhere. A collective."""
        self._engine.eval()
        logprobs_BT: Tensor = self._engine(rows.token_ids_BT, rows.loss_mask_BT, rows.temperatures_B)
        return logprobs_BT

    def _mean_weight(self, prepared: Sequence[Prepared], plan: BatchPlan) -> float:
        """Of all tokens of the batch that carry loss; 1 if every weight is 0."""
        total = torch.zeros(1, dtype=torch.float64, device=self._engine.device)
        for each in prepared:
            assert each.proximal_logprobs_BT is not None
            correction = correct(each.proximal_logprobs_BT, each.rows, self._correction, version=plan.version)
            total += correction.weights_BT[each.rows.loss_mask_BT].double().sum()
        ranks.sum_in_place(total)
        return total.item() / plan.num_sampled_tokens or 1.0


def needs_proximal(trainer: TrainerSection, *, num_steps: int) -> bool:
    """Whether log π_prox is needed before the first of the update's steps, or after it."""
    is_read_before = trainer.correction.batch_normalise or trainer.kl.is_in_reward
    is_read_by_loss = trainer.correction.needs_ratio or reads_proximal(trainer)
    return is_read_before or (num_steps > 1 and is_read_by_loss)


def reads_proximal(trainer: TrainerSection) -> bool:
    """Whether the policy loss looks at log π_prox. One of a user's own may."""
    if trainer.pg_variant == "decoupled_ppo":
        return trainer.policy_loss.proximal == "recomputed"
    return trainer.pg_variant not in POLICY_LOSSES
