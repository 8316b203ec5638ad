"""One update on every rank: for each step forward, loss, backward over micro-batches, then the optimizer's step.

DeepSpeed divides gradients by the number of ranks and, unless told otherwise, by its accumulation steps. The loss here is already
a sum of globally weighted tokens, so the first is undone and the second switched off.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import deepspeed
import torch
from torch import Tensor

from shared.configuration import TrainerSection
from shared.trajectory import Trajectory
from trainer import ranks
from trainer.aggregation import AGGREGATIONS, BatchSize
from trainer.batching import BatchPlan, MicroBatchPlan, StepPlan, by_step
from trainer.learning_rate import learning_rate
from trainer.losses import POLICY_LOSSES, LossSettings, behaviour_log_ratio
from trainer.measures import Measures, MeasureSums
from trainer.micro_batch import MicroBatch, collate
from trainer.mismatch import MismatchCheck
from trainer.model import Policy


@dataclass(frozen=True)
class Learned:
    """What one update did. `measures` are those of the last epoch, each mini-batch before its step."""

    measures: Measures
    kl_behaviour_before: float
    """KL(μ ‖ π_θ) before the first step: how far the data was from the policy that began to learn from it."""
    grad_norm: float
    """Before clipping."""
    learning_rate: float


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

    @property
    def policy(self) -> Policy:
        policy: Policy = self.engine.module
        return policy

    def learn(self, plan: BatchPlan, trajectories: Mapping[str, Trajectory]) -> Learned:
        """The update of `plan`: `ppo_epochs` times its steps over the same batch, against the same behaviour log-probabilities.

        Args: trajectories: this rank's share, by entry id. Raises: TrainingError if engine and trainer disagree.
        """
        rate = self._set_learning_rate(plan.version)
        # Dropout, if the model has any, repeats in an update that a crash made run again.
        torch.manual_seed((self._seed * 1_000_003 + plan.version) * ranks.count() + ranks.rank())
        self.engine.train()
        first: Measures | None = None
        for _ in range(self._trainer.ppo_epochs):
            sums = MeasureSums(self.engine.device)
            for step, share in by_step(plan.steps, plan.shares[ranks.rank()]):
                self._accumulate(plan, step, share, trajectories, sums)
                if first is None:
                    first = sums.reduce()
                    self._mismatch.judge(first)
                self.engine.step()
        assert first is not None, "there is at least one epoch and one step"
        return Learned(sums.reduce(), first.kl_behaviour, float(self.engine.get_global_grad_norm()), rate)

    def _accumulate(
        self,
        plan: BatchPlan,
        step: StepPlan,
        share: Sequence[MicroBatchPlan],
        trajectories: Mapping[str, Trajectory],
        sums: MeasureSums,
    ) -> None:
        for index, planned in enumerate(share):
            self.engine.set_gradient_accumulation_boundary(index == len(share) - 1)
            rows = self._collate(planned, trajectories, plan)
            loss = self._loss(rows, step.size, sums, num_steps=len(plan.steps))
            self.engine.backward(loss * ranks.count(), scale_wrt_gas=False)

    def _collate(self, planned: MicroBatchPlan, trajectories: Mapping[str, Trajectory], plan: BatchPlan) -> MicroBatch:
        rows = [trajectories[sequence.entry_id] for sequence in planned]
        advantages = [sequence.advantage for sequence in planned]
        return collate(rows, advantages, version=plan.version, oldest_version=plan.oldest_version, device=self.engine.device)

    def _loss(self, rows: MicroBatch, batch: BatchSize, sums: MeasureSums, *, num_steps: int) -> Tensor:
        """This micro-batch's share of the loss of its mini-batch."""
        logprobs_BT = self.engine(rows.token_ids_BT, rows.loss_mask_BT, rows.temperatures_B)
        log_ratio_BT = behaviour_log_ratio(logprobs_BT, rows.behaviour_logprobs_BT)
        policy_loss = self._policy_loss(logprobs_BT, log_ratio_BT, rows.advantages_B1, self._bounds)
        loss = (self._token_weights(rows.loss_mask_BT, batch) * policy_loss.per_token_BT).sum()
        sums.add(
            loss=loss / num_steps,
            log_ratio_BT=log_ratio_BT,
            is_clipped_BT=policy_loss.is_clipped_BT,
            loss_mask_BT=rows.loss_mask_BT,
            is_on_policy_B1=rows.is_on_policy_B1,
        )
        return loss

    def _set_learning_rate(self, version: int) -> float:
        """Leaves it to DeepSpeed's own scheduler where the user has one."""
        if self.engine.lr_scheduler is None:
            for group in self.engine.optimizer.param_groups:
                group["lr"] = learning_rate(self._trainer, version)
        return float(self.engine.optimizer.param_groups[0]["lr"])
