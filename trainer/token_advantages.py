"""Advantages by token: formulas over the sampled tokens of each sequence, which ranks compute once an update has its batch.

A step is a sampled token. Observations are skipped, not steps: from the last token of a turn the next step is the first token of
the next turn, whatever the environment said in between, and no reward is discounted by it.

All formulas are in float64 and independent of how sequences are cut into micro-batches.

Shapes: B sequences of a micro-batch, T tokens. Where the mask is False results are 0.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

EPSILON = 1e-6


@dataclass(frozen=True)
class TokenAdvantages:
    """Both [B, T] float64, 0 where the mask is False."""

    advantages_BT: Tensor
    returns_BT: Tensor
    """What the value of the state before the token should have been."""


def rewards_at_turn_ends(scores: Sequence[Sequence[float]], turn_index_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Each turn's reward at its last sampled token, 0 elsewhere.

    The reward of a turn without a sampled token goes to the sampled token before it, or to the first if there is none before.

    Args: scores: the rewards of the turns of each sequence; fewer rows than B where the rest is padding. turn_index_BT: int64,
    of the turn that a sampled token belongs to. mask_BT: bool. Returns: [B, T] float64.
    """
    rewards_BT = torch.zeros(mask_BT.shape, dtype=torch.float64)
    turns, mask = turn_index_BT.cpu(), mask_BT.cpu()
    for row, turn_rewards in enumerate(scores):
        sampled_N = mask[row].nonzero()[:, 0]
        wanted_K = torch.arange(len(turn_rewards))
        # The sampled tokens of turns up to k end before this index.
        ends_K = torch.searchsorted(turns[row][sampled_N].contiguous(), wanted_K, right=True)
        places_K = sampled_N[(ends_K - 1).clamp(min=0)]
        rewards_BT[row].index_add_(0, places_K, torch.tensor(turn_rewards, dtype=torch.float64))
    return rewards_BT.to(mask_BT.device)


def discounted_returns(rewards_BT: Tensor, mask_BT: Tensor, *, discount: float) -> Tensor:
    """R_t = r_t + γ·R_{t+1} over sampled tokens. Args: mask_BT: bool. Returns: [B, T] float64."""
    steps = _Steps(mask_BT)
    return steps.spread(_decayed_sums(steps.gather(rewards_BT), discount))


def generalised_advantages(
    rewards_BT: Tensor, values_BT: Tensor, mask_BT: Tensor, *, discount: float, gae_lambda: float
) -> TokenAdvantages:
    """Generalised advantage estimation, arXiv:1506.02438.

        δ_t = r_t + γ·V_{t+1} - V_t,   A_t = Σ_l (γλ)^l δ_{t+l},   return_t = A_t + V_t

    where t + 1 is the next sampled token, and V is 0 after the last.

    Args: values_BT: at a sampled token, the value of the state before it. mask_BT: bool.
    """
    steps = _Steps(mask_BT)
    rewards_BN, values_BN = steps.gather(rewards_BT), steps.gather(values_BT)
    next_values_BN = torch.cat([values_BN[:, 1:], torch.zeros_like(values_BN[:, :1])], dim=1)
    advantages_BN = _decayed_sums(rewards_BN + discount * next_values_BN - values_BN, discount * gae_lambda)
    return TokenAdvantages(steps.spread(advantages_BN), steps.spread(advantages_BN + values_BN))


def normalised(advantages: Sequence[Tensor], masks: Sequence[Tensor], *, sum_over_ranks: Callable[[Tensor], None]) -> list[Tensor]:
    """(A - mean) / (std + eps) with mean and std over the masked tokens of all micro-batches of all ranks.

    Args: advantages, masks: a [B, T] for each micro-batch of this rank. sum_over_ranks: replaces a float64 tensor by its sum
    over all ranks; called twice.
    """
    tokens_N = torch.cat([part.double()[mask] for part, mask in zip(advantages, masks, strict=True)])
    totals = torch.stack([tokens_N.sum(), tokens_N.new_tensor(len(tokens_N))])
    sum_over_ranks(totals)
    total, count = totals.tolist()
    mean = total / max(1.0, count)
    squares = (tokens_N - mean).square().sum()
    sum_over_ranks(squares)
    std = math.sqrt(squares.item() / max(1.0, count - 1))
    return [(part.double() - mean) / (std + EPSILON) * mask for part, mask in zip(advantages, masks, strict=True)]


class _Steps:
    """The sampled tokens of each sequence, moved to its front: [B, N] with N = T."""

    def __init__(self, mask_BT: Tensor) -> None:
        self._order_BN = torch.argsort((~mask_BT).to(torch.int8), dim=1, stable=True)
        self._is_step_BN = mask_BT.gather(1, self._order_BN)

    def gather(self, values_BT: Tensor) -> Tensor:
        """[B, N] float64, 0 after the last step of a sequence."""
        return torch.where(self._is_step_BN, values_BT.double().gather(1, self._order_BN), 0.0)

    def spread(self, values_BN: Tensor) -> Tensor:
        """[B, T], the inverse of `gather`, 0 where the mask is False."""
        masked_BN = torch.where(self._is_step_BN, values_BN, 0.0)
        return torch.zeros_like(masked_BN).scatter(1, self._order_BN, masked_BN)


def _decayed_sums(values_BN: Tensor, decay: float) -> Tensor:
    """S_n = Σ_l decay^l x_{n+l}, in log2(N) steps that each double how far a sum reaches."""
    sums_BN, reach = values_BN, 1
    while reach < values_BN.shape[1]:
        further_BN = torch.zeros_like(sums_BN)
        further_BN[:, :-reach] = decay**reach * sums_BN[:, reach:]
        sums_BN, reach = sums_BN + further_BN, 2 * reach
    return sums_BN
