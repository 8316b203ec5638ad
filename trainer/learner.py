"""One update on every rank: forward, loss, backward over micro-batches, then the optimizer's step.

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
from trainer.batching import BatchPlan
from trainer.critic import Critic, ValueMeasures
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
    """Before clipping; 0 while the critic warms up."""
    learning_rate: float
    values: ValueMeasures | None = None
    """None without a critic."""


class Learner:
    """Owns the DeepSpeed engine between two updates."""

    def __init__(
        self,
        engine: deepspeed.DeepSpeedEngine,
        trainer: TrainerSection,
        *,
        seed: int,
        reference: ReferencePolicy | None,
        critic: Critic | None = None,
    ) -> None:
        """Args: reference: None without a KL penalty. critic: None but for an estimator that needs one."""
        self.engine = engine
        self._critic = critic
        self._critic_warmup = trainer.critic.warmup_updates if trainer.critic else 0
        self.kl_controller = KlController(trainer.kl)
        self._preparation = Preparation(engine, trainer, reference=reference, controller=self.kl_controller, critic=critic)
        self._trainer = trainer
        self._seed = seed
        self._objective = Objective(trainer, self.kl_controller)
        self._mismatch = MismatchCheck(self._preparation.score, max_mean=trainer.max_logprob_mismatch, device=engine.device)

    @property
    def policy(self) -> Policy:
        policy: Policy = self.engine.module
        return policy

    @property
    def engines(self) -> dict[str, deepspeed.DeepSpeedEngine]:
        """All that training changes, by the name under which a checkpoint keeps it."""
        return {"policy": self.engine} | ({"critic": self._critic.engine} if self._critic else {})

    def learn(self, plan: BatchPlan, trajectories: Mapping[str, Trajectory]) -> Learned:
        """The update of `plan`: `ppo_epochs` steps over the same batch, against the same behaviour log-probabilities.

        While the critic warms up, it alone takes them, and the policy is only measured.

        Args: trajectories: this rank's share, by entry id. Raises: TrainingError if engine and trainer disagree.
        """
        learning_rate = self._set_learning_rate(plan.version)
        # Dropout, if the model has any, repeats in an update that a crash made run again.
        torch.manual_seed((self._seed * 1_000_003 + plan.version) * ranks.count() + ranks.rank())
        prepared = self._preparation.prepare(plan, trajectories)
        self._mismatch.judge([each.rows for each in prepared])
        if plan.version < self._critic_warmup:
            values = [self._learn_values(plan, prepared) for _ in range(self._trainer.ppo_epochs)]
            measures = self._measure(plan, prepared)
            return Learned(measures, measures.kl_behaviour, self.kl_controller.coefficient, 0.0, 0.0, values[-1])
        self.engine.train()
        epochs: list[Measures] = []
        values = []
        for _ in range(self._trainer.ppo_epochs):
            epochs.append(self._accumulate(plan, prepared))
            self.engine.step()
            values.append(self._learn_values(plan, prepared))
        kl_coefficient = self.kl_controller.coefficient
        self.kl_controller.observe(epochs[0].kl_reference, num_sequences=plan.num_sequences)
        return Learned(
            epochs[-1],
            epochs[0].kl_behaviour,
            kl_coefficient,
            grad_norm=float(self.engine.get_global_grad_norm()),
            learning_rate=learning_rate,
            values=values[-1],
        )

    def _learn_values(self, plan: BatchPlan, prepared: Sequence[Prepared]) -> ValueMeasures | None:
        """A step of the critic, if there is one."""
        if self._critic is None:
            return None
        return self._critic.learn([(each.rows, each.value_targets) for each in prepared if each.value_targets], plan.size)

    @torch.no_grad()
    def _measure(self, plan: BatchPlan, prepared: Sequence[Prepared]) -> Measures:
        """What `_accumulate` measures, of a policy that does not learn."""
        self.engine.eval()
        sums = MeasureSums(self.engine.device)
        for each in prepared:
            self._loss(plan, each, sums)
        return sums.reduce()

    def _accumulate(self, plan: BatchPlan, prepared: Sequence[Prepared]) -> Measures:
        sums = MeasureSums(self.engine.device)
        for index, each in enumerate(prepared):
            self.engine.set_gradient_accumulation_boundary(index == len(prepared) - 1)
            loss = self._loss(plan, each, sums)
            self.engine.backward(loss * ranks.count(), scale_wrt_gas=False)
        return sums.reduce()

    def _loss(self, plan: BatchPlan, prepared: Prepared, sums: MeasureSums) -> Tensor:
        rows = prepared.rows
        logprobs_BT = self.engine(rows.token_ids_BT, rows.loss_mask_BT, rows.temperatures_B)
        return self._objective.loss(logprobs_BT, prepared, version=plan.version, batch=plan.size, sums=sums)

    def _set_learning_rate(self, version: int) -> float:
        first = min(version, self._critic_warmup)
        learning_rate = warmed_up(self._trainer.learning_rate, version - first, warmup_updates=self._trainer.warmup_updates)
        for group in self.engine.optimizer.param_groups:
            group["lr"] = learning_rate
        return learning_rate


def warmed_up(learning_rate: float, version: int, *, warmup_updates: int) -> float:
    """The rate of the update that trains `version`: linear from 1/W to 1 over the first W updates, then constant."""
    return learning_rate * min(1.0, (version + 1) / max(1, warmup_updates))
