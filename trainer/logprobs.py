"""Log-probabilities of sampled tokens, without a float32 copy of all logits.

Shapes: B sequences, T tokens, N sampled tokens, H hidden size, V vocabulary.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

MAX_CHUNK_LOGITS = 2**24
"""Logits alive at once: 64 MiB in float32. The backward pass recomputes them chunk by chunk."""


def sampled_token_logprobs(
    hidden_BTH: Tensor, head: nn.Linear, token_ids_BT: Tensor, loss_mask_BT: Tensor, temperatures_B: Tensor
) -> Tensor:
    """log softmax(logits / τ) of every sampled token, 0 elsewhere: what the engine reports, before top-p and top-k.

    Position t - 1 predicts token t, so the first token of a sequence is never a sampled one.

    Args: loss_mask_BT: bool, False in column 0. temperatures_B: τ of each sequence. Returns: [B, T] float32.
    """
    is_sampled_BP = loss_mask_BT[:, 1:]
    temperatures_BP = temperatures_B[:, None].expand(is_sampled_BP.shape)
    logprobs_N = _logprobs(
        hidden_BTH[:, :-1][is_sampled_BP], head, token_ids_BT[:, 1:][is_sampled_BP], temperatures_BP[is_sampled_BP]
    )
    return torch.zeros(loss_mask_BT.shape, device=logprobs_N.device).masked_scatter(loss_mask_BT, logprobs_N)


def _logprobs(hidden_NH: Tensor, head: nn.Linear, token_ids_N: Tensor, temperatures_N: Tensor) -> Tensor:
    chunk = max(1, MAX_CHUNK_LOGITS // head.out_features)
    if len(hidden_NH) <= chunk:
        return _chunk_logprobs(hidden_NH, head, token_ids_N, temperatures_N)
    parts = zip(*(torch.split(tensor, chunk) for tensor in (hidden_NH, token_ids_N, temperatures_N)), strict=True)
    return torch.cat(
        [
            checkpoint(_chunk_logprobs, hidden, head, token_ids, temperatures, use_reentrant=False, preserve_rng_state=False)
            for hidden, token_ids, temperatures in parts
        ]
    )


def _chunk_logprobs(hidden_NH: Tensor, head: nn.Linear, token_ids_N: Tensor, temperatures_N: Tensor) -> Tensor:
    logits_NV = head(hidden_NH).float() / temperatures_N[:, None]
    return -functional.cross_entropy(logits_NV, token_ids_N, reduction="none")
