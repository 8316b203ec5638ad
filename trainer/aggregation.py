"""How token losses become one number: weights that depend on the global batch only.

    loss = Σ_ranks Σ_micro-batches Σ_it w_it · loss_it

With every w_it fixed by the whole batch before the first forward pass, the loss and its gradient are the same however the batch
is packed, split into micro-batches or spread over ranks.

Shapes: B sequences of a micro-batch, T tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class BatchSize:
    """The whole batch, over all ranks: sequences with a sampled token, and sampled tokens."""

    num_sequences: int
    num_sampled_tokens: int


class Aggregation(Protocol):
    """[B, T] float weights, 0 where the mask is 0, from the [B, T] bool loss mask and the size of the whole batch."""

    def __call__(self, loss_mask_BT: Tensor, batch: BatchSize) -> Tensor: ...


def token_mean(loss_mask_BT: Tensor, batch: BatchSize) -> Tensor:
    """w = 1 / N with N the sampled tokens of the whole batch: each token counts the same."""
    return loss_mask_BT.float() / batch.num_sampled_tokens


def seq_mean_token_mean(loss_mask_BT: Tensor, batch: BatchSize) -> Tensor:
    """w_it = 1 / (S · n_i) with S sequences and n_i sampled tokens of sequence i: each sequence counts the same."""
    sampled_B1 = loss_mask_BT.sum(dim=1, keepdim=True).clamp(min=1)
    return loss_mask_BT.float() / (batch.num_sequences * sampled_B1)


AGGREGATIONS: Mapping[str, Aggregation] = {"token-mean": token_mean, "seq-mean-token-mean": seq_mean_token_mean}
