"""How token losses become one number: weights that depend on the global batch only.

    loss = Σ_ranks Σ_micro-batches Σ_it w_it · loss_it

With every w_it fixed by the whole batch before the first forward pass, the loss and its gradient are the same however the batch
is packed, split into micro-batches or spread over ranks.

Shapes: B sequences of a micro-batch, T tokens. S sequences and N tokens of the step's batch carry loss, n_i of sequence i.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class BatchSize:
    """What one step learns from, over all ranks: the whole batch, or a mini-batch of it."""

    num_sequences: int
    """S."""
    num_sampled_tokens: int
    """N."""


class Aggregation(Protocol):
    """[B, T] float weights, 0 where the mask is 0, from the [B, T] bool loss mask.

    Args: batch: of the step. norm_tokens: L; None unless the mode needs it.
    """

    def __call__(self, loss_mask_BT: Tensor, batch: BatchSize, *, norm_tokens: int | None) -> Tensor: ...


def token_mean(loss_mask_BT: Tensor, batch: BatchSize, *, norm_tokens: int | None) -> Tensor:
    """w = 1 / N: each token counts the same."""
    return loss_mask_BT.float() / batch.num_sampled_tokens


def seq_mean_token_mean(loss_mask_BT: Tensor, batch: BatchSize, *, norm_tokens: int | None) -> Tensor:
    """w_it = 1 / (S · n_i): each sequence counts the same."""
    sampled_B1 = loss_mask_BT.sum(dim=1, keepdim=True).clamp(min=1)
    return loss_mask_BT.float() / (batch.num_sequences * sampled_B1)


def seq_mean_token_sum(loss_mask_BT: Tensor, batch: BatchSize, *, norm_tokens: int | None) -> Tensor:
    """w = 1 / S: the mean over sequences of the sum over their tokens."""
    return loss_mask_BT.float() / batch.num_sequences


def seq_mean_token_sum_norm(loss_mask_BT: Tensor, batch: BatchSize, *, norm_tokens: int | None) -> Tensor:
    """w = 1 / (S · L), L a constant: no length is preferred, Dr. GRPO, arXiv:2503.20783."""
    assert norm_tokens, "the configuration requires it with this mode"
    return loss_mask_BT.float() / (batch.num_sequences * norm_tokens)


AGGREGATIONS: Mapping[str, Aggregation] = {
    "token-mean": token_mean,
    "seq-mean-token-mean": seq_mean_token_mean,
    "seq-mean-token-sum": seq_mean_token_sum,
    "seq-mean-token-sum-norm": seq_mean_token_sum_norm,
}
