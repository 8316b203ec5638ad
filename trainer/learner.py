"""One update on every rank: forward, loss, backward over micro-batches, then the optimizer's step.

DeepSpeed divides gradients by the number of ranks and, unless told otherwise, by its accumulation steps. The loss here is already
a sum of globally weighted tokens, so the first is undone and the second switched off.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import deepspeed
import torch

from shared.configuration import TrainerSection
from shared.trajectory import Trajectory
from trainer import ranks
from trainer.batching import BatchPlan
from trainer.kl import KlController
from trainer.measures import Measures, MeasureSums
from trainer.mismatch import MismatchCheck
from trainer.model import Policy
from trainer.objective import Objective
from trainer.preparation import Preparation, Prepared
from trainer.reference import ReferencePolicy


@dataclass(frozen=True)
class Learned:
    """What one update did. `measures` are those of the last epoch, before its step."""

    measures: Measures
    kl_behaviour_before: float
    """KL(μ ‖ π_θ) before the first step: how far the data was from the policy that began to learn from it."""
    kl_coefficient: float
    """β that the update used."""
    grad_norm: float
    """Before clipping."""
    learning_rate: float


class Learner:
    """Owns the DeepSpeed engine between two updates."""

    def __init__(
        self, engine: deepspeed.DeepSpeedEngine, trainer: TrainerSection, *, seed: int, reference: ReferencePolicy | None
    ) -> None:
        """Args: reference: None without a KL penalty."""
        self.engine = engine
        self.kl_controller = KlController(trainer.kl)
        self._preparation = Preparation(engine, trainer, reference=reference, controller=self.kl_controller)
        self._trainer = trainer
        self._seed = seed
        self._objective = Objective(trainer, self.kl_controller)
        self._mismatch = MismatchCheck(self._preparation.score, max_mean=trainer.max_logprob_mismatch, device=engine.device)

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
        prepared = self._preparation.prepare(plan, trajectories)
        self._mismatch.judge([each.rows for each in prepared])
        self.engine.train()
        epochs: list[Measures] = []
        for _ in range(self._trainer.ppo_epochs):
            epochs.append(self._accumulate(plan, prepared))
            self.engine.step()
        kl_coefficient = self.kl_controller.coefficient
        self.kl_controller.observe(epochs[0].kl_reference, num_sequences=plan.num_sequences)
        return Learned(epochs[-1], epochs[0].kl_behaviour, kl_coefficient, float(self.engine.get_global_grad_norm()), learning_rate)

    def _accumulate(self, plan: BatchPlan, prepared: Sequence[Prepared]) -> Measures:
        sums = MeasureSums(self.engine.device)
        for index, each in enumerate(prepared):
            self.engine.set_gradient_accumulation_boundary(index == len(prepared) - 1)
            rows = each.rows
            logprobs_BT = self.engine(rows.token_ids_BT, rows.loss_mask_BT, rows.temperatures_B)
            loss = self._objective.loss(logprobs_BT, each, version=plan.version, batch=plan.size, sums=sums)
            self.engine.backward(loss * ranks.count(), scale_wrt_gas=False)
        return sums.reduce()

    def _set_learning_rate(self, version: int) -> float:
        learning_rate = warmed_up(self._trainer.learning_rate, version, warmup_updates=self._trainer.warmup_updates)
        for group in self.engine.optimizer.param_groups:
            group["lr"] = learning_rate
        return learning_rate


def warmed_up(learning_rate: float, version: int, *, warmup_updates: int) -> float:
    """The rate of the update that trains `version`: linear from 1/W to 1 over the first W updates, then constant."""
    return learning_rate * min(1.0, (version + 1) / max(1, warmup_updates))
