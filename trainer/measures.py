"""What one update measures about its loss and its data, summed over micro-batches and ranks.

Shapes: B sequences, T tokens. Every mean is over the sampled tokens of the whole batch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer import ranks
from trainer.corrections import Correction
from trainer.kl import k3
from trainer.losses import PolicyLoss
from trainer.micro_batch import MicroBatch

_SUMS = (
    "loss",
    "tokens",
    "clipped",
    "truncated",
    "dropped",
    "weight",
    "ratio",
    "ratio_squared",
    "kl_behaviour",
    "kl_reference",
    "mismatch",
    "mismatch_tokens",
)


@dataclass(frozen=True)
class Measures:
    """r is π_θ / μ before the step; μ the behaviour policy."""

    loss: float
    clip_fraction: float
    """Tokens of which a bound of the policy loss was active."""
    truncated_fraction: float
    """Tokens whose ratio the correction truncated."""
    dropped_fraction: float
    """Tokens that the correction gave the weight 0."""
    mean_weight: float
    """Of the correction, before it is normalised; 1 without one."""
    mean_ratio: float
    effective_sample_size: float
    """(Σ r)² / (N · Σ r²), in (0, 1]: 1 when the data is on-policy."""
    kl_behaviour: float
    """KL(μ ‖ π_θ), estimated by the mean of r - 1 - log r (k3)."""
    kl_reference: float
    """KL(π_θ ‖ π_ref), the mean of trainer.kl.estimator; 0 without a reference policy."""
    logprob_mismatch_max: float | None
    """Largest |log π_θ - log μ| over episodes sampled by exactly the version being trained; None without such episodes."""
    logprob_mismatch_mean: float | None


class MeasureSums:
    """Running sums; `reduce` makes them global."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(len(_SUMS), dtype=torch.float64, device=device)
        self._mismatch_max = torch.zeros(1, dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(
        self,
        *,
        loss: Tensor,
        rows: MicroBatch,
        log_ratio_BT: Tensor,
        policy_loss: PolicyLoss,
        correction: Correction,
        kl_BT: Tensor,
    ) -> None:
        """One micro-batch. Args: loss: its weighted sum, a share of the batch's loss. kl_BT: KL(π_θ ‖ π_ref) by token."""
        mask_BT = rows.loss_mask_BT
        log_ratio = log_ratio_BT[mask_BT].double()
        ratio = log_ratio.exp()
        mismatch = log_ratio_BT[mask_BT & rows.is_on_policy_B1].double().abs()
        sums = (
            loss.double(),
            mask_BT.sum(),
            (policy_loss.is_clipped_BT & mask_BT).sum(),
            (correction.is_truncated_BT & mask_BT).sum(),
            (correction.is_dropped_BT & mask_BT).sum(),
            correction.weights_BT[mask_BT].double().sum(),
            ratio.sum(),
            ratio.square().sum(),
            k3(log_ratio).sum(),
            kl_BT[mask_BT].double().sum(),
            mismatch.sum(),
            torch.tensor(mismatch.numel()),
        )
        self._sums += torch.stack([value.to(self._sums) for value in sums])
        if mismatch.numel():
            self._mismatch_max = torch.maximum(self._mismatch_max, mismatch.max())

    def reduce(self, *, num_steps: int = 1) -> Measures:
        """The measures of all ranks so far; more may be added. A collective: every rank calls it.

        Args: num_steps: mini-batches added, over whose losses the mean is taken.
        """
        sums, mismatch_max = self._sums.clone(), self._mismatch_max.clone()
        ranks.sum_in_place(sums)
        ranks.max_in_place(mismatch_max)
        total = dict(zip(_SUMS, sums.tolist(), strict=True))
        tokens, compared = total["tokens"], total["mismatch_tokens"]
        return Measures(
            loss=total["loss"] / num_steps,
            clip_fraction=total["clipped"] / tokens,
            truncated_fraction=total["truncated"] / tokens,
            dropped_fraction=total["dropped"] / tokens,
            mean_weight=total["weight"] / tokens,
            mean_ratio=total["ratio"] / tokens,
            effective_sample_size=total["ratio"] ** 2 / (tokens * total["ratio_squared"]),
            kl_behaviour=total["kl_behaviour"] / tokens,
            kl_reference=total["kl_reference"] / tokens,
            logprob_mismatch_max=mismatch_max.item() if compared else None,
            logprob_mismatch_mean=total["mismatch"] / compared if compared else None,
        )
