"""Policy losses by token, always against the behaviour policy.

    r = π_θ / μ = exp(clamp(log π_θ - log μ, -20, 20))

where μ is the engine's own log-probability at the version that sampled the token, not a recomputation: recomputing makes r = 1
at the first step and switches every bound off. sg[·] stops the gradient; ε, C, τ and c are `PolicyLossSection`'s.

A new variant is a function here and a line in POLICY_LOSSES; one of a user's own has the same signature.

Shapes: B sequences, T tokens. Values where the loss mask is 0 are finite and mean nothing; `aggregation` weighs them 0.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from shared.loss_settings import PolicyLossSection
from trainer.kl import clamped_log_ratio


@dataclass(frozen=True)
class LossInputs:
    """What a variant may look at. [B, T], and [B, 1] by sequence."""

    logprobs_BT: Tensor
    """log π_θ, float32; the only one with a gradient."""
    behaviour_logprobs_BT: Tensor
    """log μ, float32."""
    proximal_logprobs_BT: Tensor
    """log π_prox, float32: of the policy that the update began with."""
    advantages_BT: Tensor
    """A, float32."""
    rewards_B1: Tensor
    """Of whole episodes, float32."""
    loss_mask_BT: Tensor
    """bool, True where a token carries loss."""
    versions_BT: Tensor
    """int64, the policy version that sampled each token."""
    version: int
    """The policy version being trained, π_prox's; the update makes the next one."""

    @property
    def log_ratio_BT(self) -> Tensor:
        """log r, with gradient."""
        return clamped_log_ratio(self.logprobs_BT, self.behaviour_logprobs_BT)


@dataclass(frozen=True)
class PolicyLoss:
    """What a variant says of each token, [B, T]."""

    per_token_BT: Tensor
    """Carries the gradient."""
    is_clipped_BT: Tensor
    """bool: a bound was active and changed the token's loss."""


class PolicyLossFunction(Protocol):
    """A policy loss by token."""

    def __call__(self, inputs: LossInputs, settings: PolicyLossSection) -> PolicyLoss: ...


def vanilla(inputs: LossInputs, settings: PolicyLossSection) -> PolicyLoss:
    """-A · log π_θ, REINFORCE. Nothing corrects for off-policy data."""
    return _weighted(torch.ones_like(inputs.advantages_BT), inputs, torch.zeros_like(inputs.loss_mask_BT))


def ppo(inputs: LossInputs, settings: PolicyLossSection) -> PolicyLoss:
    """-min(r·A, clip(r, 1 - ε_low, 1 + ε_high)·A), arXiv:1707.06347; ε_high > ε_low is clip-higher, arXiv:2503.14476.

    With dual clip, where A < 0: -max(min(…), c·A), arXiv:1912.09729.
    """
    return _clipped(inputs.log_ratio_BT.exp(), inputs.advantages_BT, settings, dual_clip=settings.dual_clip)


def tis(inputs: LossInputs, settings: PolicyLossSection) -> PolicyLoss:
    """-sg[min(r, C)] · A · log π_θ: truncated importance sampling."""
    ratio_BT = inputs.log_ratio_BT.detach().exp()
    return _weighted(ratio_BT.clamp(max=settings.tis_cap), inputs, ratio_BT > settings.tis_cap)


def cispo(inputs: LossInputs, settings: PolicyLossSection) -> PolicyLoss:
    """-sg[clip(r, 1 - ε_low, 1 + ε_high)] · A · log π_θ, arXiv:2506.13585."""
    ratio_BT = inputs.log_ratio_BT.detach().exp()
    weight_BT = ratio_BT.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    return _weighted(weight_BT, inputs, weight_BT != ratio_BT)


def topr(inputs: LossInputs, settings: PolicyLossSection) -> PolicyLoss:
    """-A · log π_θ where the episode's reward is positive, else -sg[clip(r, 0, 1)] · A · log π_θ, arXiv:2503.14286."""
    ratio_BT = inputs.log_ratio_BT.detach().exp()
    is_positive_B1 = inputs.rewards_B1 > 0
    weight_BT = torch.where(is_positive_B1, 1.0, ratio_BT.clamp(max=1))
    return _weighted(weight_BT, inputs, (ratio_BT > 1) & ~is_positive_B1)


def kimi15(inputs: LossInputs, settings: PolicyLossSection) -> PolicyLoss:
    """-A · log π_θ + (τ / 2) · (log π_θ - log μ)², arXiv:2501.12599."""
    policy_gradient_BT = -inputs.advantages_BT * inputs.logprobs_BT
    regulariser_BT = settings.kimi_tau / 2 * inputs.log_ratio_BT.square()
    return PolicyLoss(policy_gradient_BT + regulariser_BT, torch.zeros_like(inputs.loss_mask_BT))


def decoupled_ppo(inputs: LossInputs, settings: PolicyLossSection) -> PolicyLoss:
    """-w · min(ρ·A, clip(ρ, 1 - ε_low, 1 + ε_high)·A), ρ = π_θ / π_prox, w = sg[min(π_prox / μ, C)], arXiv:2505.24298."""
    is_interpolated = settings.proximal == "interpolated"
    proximal_BT = interpolated_proximal(inputs) if is_interpolated else inputs.proximal_logprobs_BT
    behaviour_ratio_BT = clamped_log_ratio(proximal_BT, inputs.behaviour_logprobs_BT).exp()
    ratio_BT = clamped_log_ratio(inputs.logprobs_BT, proximal_BT).exp()
    clipped = _clipped(ratio_BT, inputs.advantages_BT, settings, dual_clip=None)
    return PolicyLoss(
        behaviour_ratio_BT.clamp(max=settings.tis_cap) * clipped.per_token_BT,
        clipped.is_clipped_BT | (behaviour_ratio_BT > settings.tis_cap),
    )


def gspo(inputs: LossInputs, settings: PolicyLossSection) -> PolicyLoss:
    """-min(s·A, clip(s, 1 - ε_low, 1 + ε_high)·A), s = exp(mean_t log r_t) of the sequence, arXiv:2507.18071.

    By token, s_t = sg[s] · π_θ / sg[π_θ]: the same value and, with one advantage a sequence, the same gradient as the formula
    averaged over the sequence's tokens (the paper's GSPO-token), so it belongs with loss_agg_mode seq-mean-token-mean.
    """
    log_ratio_BT = inputs.log_ratio_BT.detach() * inputs.loss_mask_BT
    num_tokens_B1 = inputs.loss_mask_BT.sum(dim=1, keepdim=True).clamp(min=1)
    log_sequence_ratio_B1 = log_ratio_BT.sum(dim=1, keepdim=True) / num_tokens_B1
    gradient_carrier_BT = inputs.logprobs_BT - inputs.logprobs_BT.detach()
    ratio_BT = (log_sequence_ratio_B1 + gradient_carrier_BT).exp()
    return _clipped(ratio_BT, inputs.advantages_BT, settings, dual_clip=settings.dual_clip)


def clamped_is(inputs: LossInputs, settings: PolicyLossSection) -> PolicyLoss:
    """-clip(r, lo, hi) · A, whose gradient is 0 outside the bounds: the one-step-off recipe's plain form."""
    ratio_BT = inputs.log_ratio_BT.exp()
    clamped_BT = ratio_BT.clamp(settings.clamp_low, settings.clamp_high)
    return PolicyLoss(-clamped_BT * inputs.advantages_BT, clamped_BT != ratio_BT)


def interpolated_proximal(inputs: LossInputs) -> Tensor:
    """log π_prox ≈ log μ + (v_prox - v_μ) / (v_θ - v_μ) · (log π_θ - log μ), [B, T] without gradient.

    v_prox is the version being trained and v_θ the next. Tokens of a lineage that a crash cut off may be of a later version than
    v_prox; they count as its own, for which π_prox = μ.
    """
    age_BT = (inputs.version - inputs.versions_BT).clamp(min=0)
    share_BT = age_BT / (age_BT + 1)
    return inputs.behaviour_logprobs_BT + share_BT * (inputs.logprobs_BT.detach() - inputs.behaviour_logprobs_BT)


def _weighted(weight_BT: Tensor, inputs: LossInputs, is_clipped_BT: Tensor) -> PolicyLoss:
    """-weight · A · log π_θ; the weight carries no gradient."""
    return PolicyLoss(-weight_BT * inputs.advantages_BT * inputs.logprobs_BT, is_clipped_BT)


def _clipped(ratio_BT: Tensor, advantages_BT: Tensor, settings: PolicyLossSection, *, dual_clip: float | None) -> PolicyLoss:
    """PPO's pessimistic bound on ratio · A."""
    unbounded_BT = ratio_BT * advantages_BT
    objective_BT = torch.minimum(unbounded_BT, ratio_BT.clamp(1 - settings.clip_low, 1 + settings.clip_high) * advantages_BT)
    if dual_clip is not None:
        objective_BT = torch.where(advantages_BT < 0, torch.maximum(objective_BT, dual_clip * advantages_BT), objective_BT)
    return PolicyLoss(-objective_BT, objective_BT != unbounded_BT)


POLICY_LOSSES: Mapping[str, PolicyLossFunction] = {
    "ppo": ppo,
    "tis": tis,
    "vanilla": vanilla,
    "cispo": cispo,
    "topr": topr,
    "kimi15": kimi15,
    "decoupled_ppo": decoupled_ppo,
    "gspo": gspo,
    "clamped_is": clamped_is,
}
