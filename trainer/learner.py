"""One update on every rank: for each step forward, loss, backward over micro-batches, then the optimizer's step.

DeepSpeed divides gradients by the number of ranks and, unless told otherwise, by its accumulation steps. The loss here is already
a sum of globally weighted tokens, so the first is undone and the second switched off.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import deepspeed
import msgspec
import torch

from shared.configuration import TrainerSection
from shared.trajectory import Trajectory
from trainer import ranks
from trainer.batching import BatchPlan, StepPlan, by_step, entry_ids
from trainer.critic import Critic, ValueMeasures, ValueSums
from trainer.guards import SkippedStep, infectious, non_finite_rows
from trainer.kl import KlController
from trainer.learning_rate import learning_rate
from trainer.measures import Measures, MeasureSums
from trainer.mismatch import MismatchCheck
from trainer.model import Policy
from trainer.objective import Objective
from trainer.preparation import Preparation, Prepared
from trainer.reference import ReferencePolicy


@dataclass(frozen=True)
class Learned:
    """What one update did. `measures` are those of the last epoch that took a step, each mini-batch before its step."""

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
    skipped: SkippedStep | None = None
    """The step that ended the update because of numbers that are not finite."""

    @property
    def has_learnt(self) -> bool:
        return self.skipped is None or self.skipped.after_steps > 0


@dataclass(frozen=True)
class _Step:
    """One optimizer step of one epoch, on this rank."""

    plan: StepPlan
    batches: Sequence[Prepared]
    number: int
    """From 1, within its epoch."""
    sums: MeasureSums
    """Of its epoch, as the next one."""
    value_sums: ValueSums


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
        self._schedule = msgspec.structs.replace(trainer, num_updates=trainer.num_updates - self._critic_warmup)
        self._seed = seed
        self._objective = Objective(trainer, self.kl_controller)
        self._mismatch = MismatchCheck(self._preparation.score, max_mean=trainer.max_logprob_mismatch, device=engine.device)
        self._offending: list[str] = []
        """Entries of this rank's share whose loss was not finite in the step under way."""

    @property
    def policy(self) -> Policy:
        policy: Policy = self.engine.module
        return policy

    @property
    def engines(self) -> dict[str, deepspeed.DeepSpeedEngine]:
        """All that training changes, by the name under which a checkpoint keeps it."""
        return {"policy": self.engine} | ({"critic": self._critic.engine} if self._critic else {})

    def learn(self, plan: BatchPlan, trajectories: Mapping[str, Trajectory]) -> Learned:
        """The update of `plan`: `ppo_epochs` times its steps over the same batch, against the same behaviour log-probabilities.

        While the critic warms up, it alone takes them, and the policy is only measured.

        Args: trajectories: this rank's share, by entry id. Raises: TrainingError if engine and trainer disagree.
        """
        is_learning = plan.version >= self._critic_warmup
        rate = self._set_learning_rate(plan.version - self._critic_warmup) if is_learning else 0.0
        # Dropout, if the model has any, repeats in an update that a crash made run again.
        torch.manual_seed((self._seed * 1_000_003 + plan.version) * ranks.count() + ranks.rank())
        prepared = self._preparation.prepare(plan, trajectories)
        self._mismatch.judge([each.rows for each in prepared])
        kl_coefficient = self.kl_controller.coefficient
        self.engine.train(is_learning)
        first: Measures | None = None
        taken: Measures | None = None
        grad_norms: list[float] = []
        skipped: SkippedStep | None = None
        for step in self._steps(plan, prepared):
            self._offending = []
            self._accumulate(plan, step, is_learning=is_learning)
            measures = step.sums.reduce(num_steps=step.number)
            first = first or measures
            if is_learning and not _is_taken(self.engine):
                skipped = self._skipped(plan, len(grad_norms))
                break
            taken = measures
            grad_norms.append(float(self.engine.get_global_grad_norm()) if is_learning else 0.0)
            if not self._learn_values(step):
                skipped = self._skipped(plan, len(grad_norms))
                break
        assert first is not None, "there is at least one epoch and one step"
        if taken and is_learning:
            self.kl_controller.observe(first.kl_reference, num_sequences=plan.num_sequences)
        return Learned(
            measures=taken or first,
            kl_behaviour_before=first.kl_behaviour,
            kl_coefficient=kl_coefficient,
            grad_norm=grad_norms[-1] if grad_norms else math.inf,
            learning_rate=rate,
            values=step.value_sums.reduce(num_steps=step.number),
            skipped=skipped,
        )

    def _steps(self, plan: BatchPlan, prepared: Sequence[Prepared]) -> Iterator[_Step]:
        for _ in range(self._trainer.ppo_epochs):
            sums, value_sums = MeasureSums(self.engine.device), ValueSums(self.engine.device)
            for number, (step, batches) in enumerate(by_step(plan.steps, prepared), start=1):
                yield _Step(step, batches, number, sums, value_sums)

    def _skipped(self, plan: BatchPlan, num_steps: int) -> SkippedStep:
        """Whose fault it was. A collective."""
        if offending := tuple(ranks.gathered(self._offending)):
            return SkippedStep("loss", offending, num_steps)
        everything = tuple(entry_id for share in plan.shares for entry_id in entry_ids(share))
        return SkippedStep("gradient", everything, num_steps)

    def _accumulate(self, plan: BatchPlan, step: _Step, *, is_learning: bool) -> None:
        for index, each in enumerate(step.batches):
            self.engine.set_gradient_accumulation_boundary(index == len(step.batches) - 1)
            rows = each.rows
            with torch.set_grad_enabled(is_learning):
                logprobs_BT = self.engine(rows.token_ids_BT, rows.loss_mask_BT, rows.temperatures_B)
                loss_BT = self._objective.loss(logprobs_BT, each, version=plan.version, batch=step.plan.size, sums=step.sums)
            if is_learning:
                loss = loss_BT.sum()
                if not loss.isfinite():
                    self._offending += non_finite_rows(loss_BT, each.entry_ids)
                self.engine.backward(infectious(loss, logprobs_BT) * ranks.count(), scale_wrt_gas=False)

    def _learn_values(self, step: _Step) -> bool:
        """The critic's part of the step, if there is one. Returns whether it was taken."""
        if self._critic is None:
            return True
        batches = [(each.rows, each.value_targets) for each in step.batches if each.value_targets]
        self._critic.learn(batches, step.plan.size, step.value_sums)
        return bool(self._critic.engine.was_step_applied())

    def _set_learning_rate(self, num_updates: int) -> float:
        """The rate after so many updates of the policy. Leaves it to DeepSpeed's own scheduler where the user has one."""
        if self.engine.lr_scheduler is None:
            for group in self.engine.optimizer.param_groups:
                group["lr"] = learning_rate(self._schedule, num_updates)
        return float(self.engine.optimizer.param_groups[0]["lr"])


def _is_taken(engine: deepspeed.DeepSpeedEngine) -> bool:
    """Steps, and says whether DeepSpeed did."""
    engine.step()
    return bool(engine.was_step_applied())
