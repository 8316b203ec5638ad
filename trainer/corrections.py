"""Off-policy corrections: a weight for each token, from how far the policy has moved since the token was sampled.

    w = action(ratio) · [not rejected] · [not too old] / mean(w)

The ratio is π_prox / μ, of the policy that the update begins with, so weights carry no gradient and stay the same over epochs. They
multiply the token losses of any variant; one that weighs by the ratio itself takes no second such weight (loss_settings).

Shapes: B sequences, T tokens. Only tokens under the loss mask count in a ratio of more than one token.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.loss_settings import CorrectionSection
from trainer.kl import KL_ESTIMATORS, MAX_ABS_LOG_RATIO, clamped_log_ratio
from trainer.micro_batch import MicroBatch


@dataclass(frozen=True)
class Correction:
    """[B, T]; what it says where the loss mask is 0 means nothing."""

    weights_BT: Tensor
    """float32, before they are normalised over the batch."""
    is_truncated_BT: Tensor
    """bool: the ratio was above the cap."""
    is_dropped_BT: Tensor
    """bool: masked, rejected or too old; the weight is 0."""


def correct(proximal_logprobs_BT: Tensor, rows: MicroBatch, settings: CorrectionSection, *, version: int) -> Correction:
    """The weights of a micro-batch. Args: version: the policy version being trained."""
    log_ratio_BT = clamped_log_ratio(proximal_logprobs_BT, rows.behaviour_logprobs_BT) * rows.loss_mask_BT
    ratio_BT = LEVELS[settings.level](log_ratio_BT, rows).clamp(-MAX_ABS_LOG_RATIO, MAX_ABS_LOG_RATIO).exp()
    weights_BT, is_truncated_BT = ACTIONS[settings.action](ratio_BT, settings)
    is_dropped_BT = weights_BT == 0
    if settings.reject_by is not None:
        is_dropped_BT = is_dropped_BT | is_rejected(log_ratio_BT, rows, settings.reject_by, above=settings.reject_above)
    if settings.max_age is not None:
        is_dropped_BT = is_dropped_BT | (version - rows.versions_BT > settings.max_age)
    return Correction(weights_BT.masked_fill(is_dropped_BT, 0.0), is_truncated_BT, is_dropped_BT)


def by_token(log_ratio_BT: Tensor, rows: MicroBatch) -> Tensor:
    """log r_t."""
    return log_ratio_BT


def by_turn(log_ratio_BT: Tensor, rows: MicroBatch) -> Tensor:
    """Σ log r over the tokens of the turn that sampled the token."""
    turn_BT = rows.turn_index_BT.clamp(min=0)
    sums_BT = torch.zeros_like(log_ratio_BT).scatter_add_(1, turn_BT, log_ratio_BT)
    return sums_BT.gather(1, turn_BT)


def by_sequence(log_ratio_BT: Tensor, rows: MicroBatch) -> Tensor:
    """Σ log r over the tokens of the sequence."""
    return log_ratio_BT.sum(dim=1, keepdim=True).expand_as(log_ratio_BT)


def by_geometric_mean(log_ratio_BT: Tensor, rows: MicroBatch) -> Tensor:
    """mean log r over the tokens of the sequence."""
    return _sequence_mean(log_ratio_BT, rows).expand_as(log_ratio_BT)


Level = Callable[[Tensor, MicroBatch], Tensor]
"""log-ratios by token, 0 outside the loss mask → the log-ratio that each token is judged by, [B, T]."""
LEVELS: Mapping[str, Level] = {"token": by_token, "turn": by_turn, "sequence": by_sequence, "geometric": by_geometric_mean}


def no_action(ratio_BT: Tensor, settings: CorrectionSection) -> tuple[Tensor, Tensor]:
    """1."""
    return torch.ones_like(ratio_BT), torch.zeros_like(ratio_BT, dtype=torch.bool)


def truncate(ratio_BT: Tensor, settings: CorrectionSection) -> tuple[Tensor, Tensor]:
    """min(ratio, high): truncated importance sampling."""
    return ratio_BT.clamp(max=settings.high), ratio_BT > settings.high


def mask(ratio_BT: Tensor, settings: CorrectionSection) -> tuple[Tensor, Tensor]:
    """1 where low <= ratio <= high, else 0: IcePop and masked importance sampling, for variants that hold the ratio already."""
    return _is_within(ratio_BT, settings).float(), torch.zeros_like(ratio_BT, dtype=torch.bool)


def masked_is(ratio_BT: Tensor, settings: CorrectionSection) -> tuple[Tensor, Tensor]:
    """The ratio where low <= ratio <= high, else 0: the same for variants without a ratio of their own."""
    return ratio_BT * _is_within(ratio_BT, settings), torch.zeros_like(ratio_BT, dtype=torch.bool)


Action = Callable[[Tensor, CorrectionSection], tuple[Tensor, Tensor]]
"""Ratios → weights, and which of the ratios were truncated, all [B, T]."""
ACTIONS: Mapping[str, Action] = {"none": no_action, "truncate": truncate, "mask": mask, "masked_is": masked_is}


def is_rejected(log_ratio_BT: Tensor, rows: MicroBatch, estimator: str, *, above: float) -> Tensor:
    """[B, 1] bool: the sequence's mean k1, k2 or k3 is above the bound, k1, which has a sign, by its absolute value.

    Args: log_ratio_BT: 0 outside the loss mask, where every estimate then is 0.
    """
    return _sequence_mean(KL_ESTIMATORS[estimator](log_ratio_BT), rows).abs() > above


def _is_within(ratio_BT: Tensor, settings: CorrectionSection) -> Tensor:
    return (ratio_BT >= settings.low) & (ratio_BT <= settings.high)


def _sequence_mean(values_BT: Tensor, rows: MicroBatch) -> Tensor:
    return values_BT.sum(dim=1, keepdim=True) / rows.loss_mask_BT.sum(dim=1, keepdim=True).clamp(min=1)
