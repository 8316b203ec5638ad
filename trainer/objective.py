"""The loss of a micro-batch: policy loss by token, weighted by the correction, with the KL penalty, aggregated.

    Σ_it a_it · (w_it · policy loss_it + β · KL_it)

a is the aggregation's weight, w the correction's; the penalty holds for every token that carries loss, also those of weight 0.

Shapes: B sequences, T tokens.
"""

import torch
from torch import Tensor

from shared.configuration import TrainerSection
from trainer.aggregation import AGGREGATIONS, BatchSize
from trainer.corrections import correct
from trainer.kl import KL_ESTIMATORS, KlController, clamped_log_ratio
from trainer.losses import LossInputs
from trainer.measures import MeasureSums
from trainer.own_loss import load_policy_loss
from trainer.preparation import Prepared


class Objective:
    """What the run file says is to be minimised."""

    def __init__(self, trainer: TrainerSection, kl_controller: KlController) -> None:
        """Raises: ConfigurationError if `trainer.pg_variant` names a function that cannot be used."""
        self._trainer = trainer
        self._kl_controller = kl_controller
        self._policy_loss = load_policy_loss(trainer.pg_variant, import_allowlist=trainer.import_allowlist)
        self._aggregation = AGGREGATIONS[trainer.loss_agg_mode]

    def loss(self, logprobs_BT: Tensor, prepared: Prepared, *, version: int, batch: BatchSize, sums: MeasureSums) -> Tensor:
        """This micro-batch's share of the loss of its step, by token, [B, T]; what it measures goes to `sums`.

        Args: logprobs_BT: log π_θ of the tokens that carry loss, with gradient. version: the one being trained.
            batch: what the step is normalised by.
        """
        rows = prepared.rows
        inputs = loss_inputs(logprobs_BT, prepared, version)
        policy_loss = self._policy_loss(inputs, self._trainer.policy_loss)
        correction = correct(inputs.proximal_logprobs_BT, rows, self._trainer.correction, version=version)
        kl_BT = self._reference_kl(logprobs_BT, prepared.reference_logprobs_BT)
        per_token_BT = correction.weights_BT / prepared.mean_weight * policy_loss.per_token_BT
        if self._trainer.kl.place == "loss":
            per_token_BT = per_token_BT + self._kl_controller.coefficient * kl_BT
        token_weights_BT = self._aggregation(rows.loss_mask_BT, batch, norm_tokens=self._trainer.loss_norm_tokens)
        loss_BT = token_weights_BT * per_token_BT
        sums.add(
            loss=loss_BT.sum(),
            rows=rows,
            log_ratio_BT=inputs.log_ratio_BT,
            policy_loss=policy_loss,
            correction=correction,
            kl_BT=kl_BT,
        )
        return loss_BT

    def _reference_kl(self, logprobs_BT: Tensor, reference_logprobs_BT: Tensor | None) -> Tensor:
        """KL(π_θ ‖ π_ref) by token, [B, T] with gradient; 0 without a reference."""
        if reference_logprobs_BT is None:
            return torch.zeros_like(logprobs_BT)
        return KL_ESTIMATORS[self._trainer.kl.estimator](clamped_log_ratio(reference_logprobs_BT, logprobs_BT))


def loss_inputs(logprobs_BT: Tensor, prepared: Prepared, version: int) -> LossInputs:
    """What the policy loss looks at. Before the update's only step, the policy in the loss is the proximal one."""
    rows, proximal_BT = prepared.rows, prepared.proximal_logprobs_BT
    return LossInputs(
        logprobs_BT=logprobs_BT,
        behaviour_logprobs_BT=rows.behaviour_logprobs_BT,
        proximal_logprobs_BT=logprobs_BT.detach() if proximal_BT is None else proximal_BT,
        advantages_BT=rows.advantages_BT,
        rewards_B1=rows.rewards_B1,
        loss_mask_BT=rows.loss_mask_BT,
        versions_BT=rows.versions_BT,
        version=version,
    )
