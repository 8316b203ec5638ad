"""One update on every rank: forward, loss, backward over micro-batches, then the optimizer's step.

DeepSpeed divides gradients by the number of ranks and, unless told otherwise, by its accumulation steps. The loss here is already
a sum of globally weighted tokens, so the first is undone and the second switched off.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import deepspeed
import torch
from torch import Tensor

from shared.configuration import TrainerSection
from shared.trajectory import Trajectory
from trainer import ranks
from trainer.aggregation import AGGREGATIONS
from trainer.batching import BatchPlan, MicroBatchPlan, entry_ids
from trainer.guards import SkippedStep, infected, non_finite_rows
from trainer.losses import POLICY_LOSSES, LossSettings, behaviour_log_ratio
from trainer.measures import Measures, MeasureSums
from trainer.micro_batch import MicroBatch, collate
from trainer.mismatch import MismatchCheck
from trainer.model import Policy


@dataclass(frozen=True)
class Learned:
    """What one update did. `measures` are those of the last epoch whose step was taken, before that step."""

    measures: Measures
    kl_behaviour_before: float
    """KL(μ ‖ π_θ) before the first step: how far the data was from the policy that began to learn from it."""
    grad_norm: float
    """Before clipping."""
    learning_rate: float
    skipped: SkippedStep | None = None
    """The step that ended the update because of numbers that are not finite."""

    @property
    def has_learnt(self) -> bool:
        return self.skipped is None or self.skipped.after_steps > 0


class Learner:
    """Owns the DeepSpeed engine between two updates."""

    def __init__(self, engine: deepspeed.DeepSpeedEngine, trainer: TrainerSection, *, seed: int) -> None:
        self.engine = engine
        self._trainer = trainer
        self._seed = seed
        self._policy_loss = POLICY_LOSSES[trainer.pg_variant]
        self._token_weights = AGGREGATIONS[trainer.loss_agg_mode]
        self._bounds = LossSettings(trainer.clip_low, trainer.clip_high, trainer.tis_cap)
        self._mismatch = MismatchCheck(max_mean_mismatch=trainer.max_logprob_mismatch)
        self._offending: list[str] = []
        """Entries of this rank's share whose loss was not finite in the epoch under way."""

    @property
    def policy(self) -> Policy:
        policy: Policy = self.engine.module
        return policy

    def learn(self, plan: BatchPlan, trajectories: Mapping[str, Trajectory]) -> Learned:
        """The update of `plan`: `ppo_epochs` steps over the same batch, against the same behaviour log-probabilities.

        Args: trajectories: this rank's share, by entry id. Raises: TrainingError if engine and trainer disagree.
        """
        learning_rate = self._set_learning_rate(plan.version)
        # Dropout, if the model has any, repeats in an update that a crash made run again.
        torch.manual_seed((self._seed * 1_000_003 + plan.version) * ranks.count() + ranks.rank())
        self.engine.train()
        epochs: list[Measures] = []
        grad_norms: list[float] = []
        for _ in range(self._trainer.ppo_epochs):
            self._offending = []
            epochs.append(self._accumulate(plan, trajectories))
            if math.isfinite(epochs[-1].loss):
                self._mismatch.judge(epochs[-1])
            self.engine.step()
            if not self.engine.was_step_applied():
                break
            grad_norms.append(float(self.engine.get_global_grad_norm()))
        num_steps = len(grad_norms)
        return Learned(
            measures=epochs[max(0, num_steps - 1)],
            kl_behaviour_before=epochs[0].kl_behaviour,
            grad_norm=grad_norms[-1] if grad_norms else math.inf,
            learning_rate=learning_rate,
            skipped=self._skipped(plan, num_steps) if num_steps < len(epochs) else None,
        )

    def _skipped(self, plan: BatchPlan, num_steps: int) -> SkippedStep:
        """Whose fault it was. A collective."""
        if offending := tuple(ranks.gathered(self._offending)):
            return SkippedStep("loss", offending, num_steps)
        everything = tuple(entry_id for share in plan.shares for entry_id in entry_ids(share))
        return SkippedStep("gradient", everything, num_steps)

    def _accumulate(self, plan: BatchPlan, trajectories: Mapping[str, Trajectory]) -> Measures:
        share = plan.shares[ranks.rank()]
        sums = MeasureSums(self.engine.device)
        for index, planned in enumerate(share):
            self.engine.set_gradient_accumulation_boundary(index == len(share) - 1)
            loss = self._loss(plan, planned, self._collate(planned, trajectories, plan), sums)
            self.engine.backward(loss * ranks.count(), scale_wrt_gas=False)
        return sums.reduce()

    def _collate(self, planned: MicroBatchPlan, trajectories: Mapping[str, Trajectory], plan: BatchPlan) -> MicroBatch:
        rows = [trajectories[sequence.entry_id] for sequence in planned]
        advantages = [sequence.advantage for sequence in planned]
        return collate(rows, advantages, version=plan.version, oldest_version=plan.oldest_version, device=self.engine.device)

    def _loss(self, plan: BatchPlan, planned: MicroBatchPlan, rows: MicroBatch, sums: MeasureSums) -> Tensor:
        """This micro-batch's share of the loss of the whole batch."""
        logprobs_BT = self.engine(rows.token_ids_BT, rows.loss_mask_BT, rows.temperatures_B)
        log_ratio_BT = behaviour_log_ratio(logprobs_BT, rows.behaviour_logprobs_BT)
        policy_loss = self._policy_loss(logprobs_BT, log_ratio_BT, rows.advantages_B1, self._bounds)
        loss_BT = self._token_weights(rows.loss_mask_BT, plan.size) * policy_loss.per_token_BT
        loss = loss_BT.sum()
        sums.add(
            loss=loss,
            log_ratio_BT=log_ratio_BT,
            is_clipped_BT=policy_loss.is_clipped_BT,
            loss_mask_BT=rows.loss_mask_BT,
            is_on_policy_B1=rows.is_on_policy_B1,
        )
        if not loss.isfinite():
            self._offending += non_finite_rows(loss_BT, [sequence.entry_id for sequence in planned])
            loss = infected(loss, logprobs_BT)
        return loss

    def _set_learning_rate(self, version: int) -> float:
        learning_rate = warmed_up(self._trainer.learning_rate, version, warmup_updates=self._trainer.warmup_updates)
        for group in self.engine.optimizer.param_groups:
            group["lr"] = learning_rate
        return learning_rate


def warmed_up(learning_rate: float, version: int, *, warmup_updates: int) -> float:
    """The rate of the update that trains `version`: linear from 1/W to 1 over the first W updates, then constant."""
    return learning_rate * min(1.0, (version + 1) / max(1, warmup_updates))
