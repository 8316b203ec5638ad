"""Rows padded on the right → one row of tokens without padding, and the log-probabilities back.

Of a row, only the tokens before its last sampled one are inputs: what comes later carries no loss, and under causal attention
nothing that does looks at it.

Shapes: B rows, T tokens of the longest, N input tokens of all rows, S sampled tokens of all rows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Packed:
    """The input tokens of all rows, one row after the other; a row without sampled tokens has none, but for the first."""

    token_ids_1N: Tensor
    """int64."""
    position_ids_1N: Tensor
    """int64, from 0 in each row."""
    predicts_N: Tensor
    """bool, True where the token after this one was sampled; in the order of `loss_mask_BT`'s True entries."""
    lengths: tuple[int, ...]
    """Input tokens of each row that has any, N in all."""

    def flash_arguments(self) -> dict[str, Tensor | int]:
        """The lengths as transformers' flash attention takes them."""
        lengths = torch.tensor((0, *self.lengths), dtype=torch.int32, device=self.token_ids_1N.device)
        starts = lengths.cumsum(0, dtype=torch.int32)
        longest = max(self.lengths)
        return {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": longest, "max_length_k": longest}


def pack(token_ids_BT: Tensor, loss_mask_BT: Tensor) -> Packed:
    """Args: loss_mask_BT: bool, False in column 0. The first row has at least one token, so that no pack is empty."""
    sampled_after_BT = loss_mask_BT.flip(1).cumsum(1).flip(1) - loss_mask_BT.long()
    is_input_BT = sampled_after_BT > 0
    is_input_BT[0, 0] = True
    predicts_BT = loss_mask_BT.roll(-1, dims=1)
    positions_BT = torch.arange(token_ids_BT.shape[1], device=token_ids_BT.device).expand_as(token_ids_BT)
    return Packed(
        token_ids_1N=token_ids_BT[is_input_BT][None],
        position_ids_1N=positions_BT[is_input_BT][None],
        predicts_N=predicts_BT[is_input_BT],
        lengths=tuple(length for length in is_input_BT.sum(1).tolist() if length),
    )


def unpack(values_S: Tensor, loss_mask_BT: Tensor) -> Tensor:
    """[B, T] with `values_S` at the sampled tokens, 0 elsewhere."""
    return torch.zeros(loss_mask_BT.shape, dtype=values_S.dtype, device=values_S.device).masked_scatter(loss_mask_BT, values_S)
