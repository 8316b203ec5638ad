"""What an update needs once, before its first epoch, and without gradient.

    collate → score (reference, proximal, values) → token rewards → advantages

The proximal policy is the one that the update begins with. With one step an update the policy in the loss *is* the proximal
policy, so nothing is scored for it unless something needs its log-probabilities before that step.

Shapes: B sequences, T tokens.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import deepspeed
import torch
from torch import Tensor

from shared.configuration import TrainerSection
from shared.trajectory import Trajectory
from trainer import ranks
from trainer.batching import BatchPlan, Share
from trainer.critic import Critic, ValueTargets
from trainer.estimation import Scored, TokenEstimation
from trainer.kl import KL_ESTIMATORS, KlController, clamped_log_ratio
from trainer.micro_batch import MicroBatch, collate
from trainer.reference import ReferencePolicy


@dataclass(frozen=True)
class Prepared:
    """One micro-batch, for all epochs of the update."""

    rows: MicroBatch
    """With the advantages that the loss uses."""
    proximal_logprobs_BT: Tensor | None
    """log π_prox of the tokens that carry loss. None: the policy in the loss is the proximal one."""
    reference_logprobs_BT: Tensor | None
    """log π_ref of the tokens that carry loss. None: no reference policy."""
    reward_penalties_BT: Tensor | None
    """β · KL(π_prox ‖ π_ref) of the tokens that carry loss, to take off their rewards. None: the KL is in the loss, if at all."""
    value_targets: ValueTargets | None
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
        critic: Critic | None,
    ) -> None:
        """Args: controller: of the KL penalty's β; without a reference it is not asked."""
        self._engine = engine
        self._critic = critic
        self._estimation = TokenEstimation(trainer)
        self._kl = trainer.kl
        self._controller = controller
        self._needs_proximal = needs_proximal(trainer)
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
        self._engine.eval()
        with ExitStack() as stack:
            if self._reference:
                stack.enter_context(self._reference.scoring())
            prepared = [self._score(rows) for rows in batches]
        self._engine.train()
        return self._with_advantages(prepared, share)

    def _score(self, rows: MicroBatch) -> Prepared:
        proximal_BT = self._proximal(rows) if self._needs_proximal else None
        reference_BT = self._reference.logprobs(rows) if self._reference else None
        return Prepared(rows, proximal_BT, reference_BT, self._reward_penalties(proximal_BT, reference_BT), value_targets=None)

    def _with_advantages(self, prepared: Sequence[Prepared], share: Share) -> list[Prepared]:
        scored = [
            Scored(planned, each.rows, each.reward_penalties_BT, self._critic.values(each.rows) if self._critic else None)
            for planned, each in zip(share, prepared, strict=True)
        ]
        return [
            dataclasses.replace(
                each,
                rows=dataclasses.replace(each.rows, advantages_BT=estimated.advantages_BT),
                value_targets=estimated.targets,
            )
            for each, estimated in zip(prepared, self._estimation.estimate(scored), strict=True)
        ]

    def _reward_penalties(self, proximal_BT: Tensor | None, reference_BT: Tensor | None) -> Tensor | None:
        if proximal_BT is None or reference_BT is None or self._kl.place != "reward":
            return None
        return self._controller.coefficient * KL_ESTIMATORS[self._kl.estimator](clamped_log_ratio(reference_BT, proximal_BT))

    def _proximal(self, rows: MicroBatch) -> Tensor:
        logprobs_BT: Tensor = self._engine(rows.token_ids_BT, rows.loss_mask_BT, rows.temperatures_B)
        return logprobs_BT


def needs_proximal(trainer: TrainerSection) -> bool:
    """Whether log π_prox is needed before the first step or after it."""
    return trainer.kl.is_in_reward
