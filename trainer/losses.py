"""Policy losses by token, always against the behaviour policy.

    r = π_θ / μ = exp(clamp(log π_θ - log μ, -20, 20))

where μ is the engine's own log-probability at the version that sampled the token, not a recomputation: recomputing makes r = 1
at the first step and switches every bound off.

Shapes: B sequences, T tokens. Values where the loss mask is 0 are finite and mean nothing; `aggregation` weighs them 0.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

MAX_ABS_LOG_RATIO = 20.0


@dataclass(frozen=True)
class LossSettings:
    """Bounds of the variants: PPO's ε below and above, and TIS's cap C."""

    clip_low: float
    clip_high: float
    tis_cap: float


@dataclass(frozen=True)
class PolicyLoss:
    """What a variant says of each token, [B, T]."""

    per_token_BT: Tensor
    """Carries the gradient."""
    is_clipped_BT: Tensor
    """bool: a bound was active and changed the token's loss."""


class PolicyLossFunction(Protocol):
    """Args: all [B, T] float32; logprobs of π_θ with gradient, log-ratio to μ with gradient, advantages without."""

    def __call__(self, logprobs_BT: Tensor, log_ratio_BT: Tensor, advantages_BT: Tensor, settings: LossSettings) -> PolicyLoss: ...


def behaviour_log_ratio(logprobs_BT: Tensor, behaviour_logprobs_BT: Tensor) -> Tensor:
    """log r, clamped so that its exponential and the square of that are finite in float32."""
    return (logprobs_BT - behaviour_logprobs_BT).clamp(-MAX_ABS_LOG_RATIO, MAX_ABS_LOG_RATIO)


def vanilla(logprobs_BT: Tensor, log_ratio_BT: Tensor, advantages_BT: Tensor, settings: LossSettings) -> PolicyLoss:
    """-A · log π_θ, REINFORCE. Nothing corrects for off-policy data."""
    return PolicyLoss(-advantages_BT * logprobs_BT, torch.zeros_like(logprobs_BT, dtype=torch.bool))


def ppo(logprobs_BT: Tensor, log_ratio_BT: Tensor, advantages_BT: Tensor, settings: LossSettings) -> PolicyLoss:
    """-min(r·A, clip(r, 1 - ε_low, 1 + ε_high)·A), arXiv:1707.06347; ε_high > ε_low is clip-higher, arXiv:2503.14476."""
    ratio_BT = log_ratio_BT.exp()
    objective_BT = ratio_BT * advantages_BT
    clipped_BT = ratio_BT.clamp(1 - settings.clip_low, 1 + settings.clip_high) * advantages_BT
    return PolicyLoss(-torch.minimum(objective_BT, clipped_BT), clipped_BT < objective_BT)


def tis(logprobs_BT: Tensor, log_ratio_BT: Tensor, advantages_BT: Tensor, settings: LossSettings) -> PolicyLoss:
    """-sg[min(r, C)] · A · log π_θ: truncated importance sampling."""
    ratio_BT = log_ratio_BT.detach().exp()
    weight_BT = ratio_BT.clamp(max=settings.tis_cap)
    return PolicyLoss(-weight_BT * advantages_BT * logprobs_BT, ratio_BT > settings.tis_cap)


POLICY_LOSSES: Mapping[str, PolicyLossFunction] = {"ppo": ppo, "tis": tis, "vanilla": vanilla}
