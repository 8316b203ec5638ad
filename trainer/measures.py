"""What one update measures about its loss and its data, summed over micro-batches and ranks.

Shapes: B sequences, T tokens. Every mean is over the sampled tokens of the whole batch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer import ranks

_SUMS = ("loss", "tokens", "clipped", "ratio", "ratio_squared", "kl", "mismatch", "mismatch_tokens")


@dataclass(frozen=True)
class Measures:
    """r is π_θ / μ before the step; μ the behaviour policy."""

    loss: float
    clip_fraction: float
    mean_ratio: float
    effective_sample_size: float
    """(Σ r)² / (N · Σ r²), in (0, 1]: 1 when the data is on-policy."""
    kl_behaviour: float
    """KL(μ ‖ π_θ), estimated by the mean of r - 1 - log r (k3)."""
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
        self, *, loss: Tensor, log_ratio_BT: Tensor, is_clipped_BT: Tensor, loss_mask_BT: Tensor, is_on_policy_B1: Tensor
    ) -> None:
        """One micro-batch. Args: loss: its weighted sum, a share of the batch's loss; the rest [B, T], masks bool, [B, 1] bool."""
        log_ratio = log_ratio_BT[loss_mask_BT].double()
        ratio = log_ratio.exp()
        mismatch = log_ratio_BT[loss_mask_BT & is_on_policy_B1].double().abs()
        sums = (
            loss.double(),
            loss_mask_BT.sum(),
            (is_clipped_BT & loss_mask_BT).sum(),
            ratio.sum(),
            ratio.square().sum(),
            (ratio - 1 - log_ratio).sum(),
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
            mean_ratio=total["ratio"] / tokens,
            effective_sample_size=total["ratio"] ** 2 / (tokens * total["ratio_squared"]),
            kl_behaviour=total["kl"] / tokens,
            logprob_mismatch_max=mismatch_max.item() if compared else None,
            logprob_mismatch_mean=total["mismatch"] / compared if compared else None,
        )
