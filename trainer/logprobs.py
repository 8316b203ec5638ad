"""Log-probabilities of sampled tokens, without a float32 copy of all logits.

Shapes: S sampled tokens, H hidden size, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor, nn

MAX_CHUNK_LOGITS = 2**24
"""Logits alive at once: 64 MiB in float32, and as much again while they are exponentiated."""


def sampled_token_logprobs(
    hidden_SH: Tensor, head: nn.Linear, token_ids_S: Tensor, temperatures_S: Tensor, *, is_float32: bool = False
) -> Tensor:
    """log softmax(logits / τ) at each sampled token: what the engine reports, before top-p and top-k.

    The logits are made chunk by chunk in the forward pass and made again in the backward pass.

    Args: hidden_SH: the last layer's output at the position before each sampled token. temperatures_S: τ of each.
        is_float32: multiply by the output layer in float32, whatever its dtype. Returns: [S] float32.
    """
    logprobs_S: Tensor = _ChunkedLogprobs.apply(hidden_SH, head.weight, head.bias, token_ids_S, temperatures_S, is_float32)  # type: ignore[no-untyped-call]
    return logprobs_S


class _ChunkedLogprobs(torch.autograd.Function):
    """d log p(a) / d logit_v = (1[v = a] - p(v)) / τ."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_SH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        token_ids_S: Tensor,
        temperatures_S: Tensor,
        is_float32: bool,
    ) -> Tensor:
        head = _Head(weight_VH, bias_V, is_float32)
        normaliser_S = torch.empty(len(hidden_SH), dtype=torch.float32, device=hidden_SH.device)
        logprobs_S = torch.empty_like(normaliser_S)
        for chunk in _chunks(len(hidden_SH), len(weight_VH)):
            logits_CV = head.logits(hidden_SH[chunk]).div_(temperatures_S[chunk, None])
            normaliser_S[chunk] = logits_CV.logsumexp(dim=1)
            logprobs_S[chunk] = logits_CV.gather(1, token_ids_S[chunk, None])[:, 0] - normaliser_S[chunk]
        ctx.save_for_backward(hidden_SH, weight_VH, bias_V, token_ids_S, temperatures_S, normaliser_S)
        ctx.is_float32 = is_float32
        return logprobs_S

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden_SH, weight_VH, bias_V, token_ids_S, temperatures_S, normaliser_S = ctx.saved_tensors
        head = _Head(weight_VH, bias_V, ctx.is_float32)
        scale_S1 = (gradients[0] / temperatures_S)[:, None]
        needs_weight, needs_bias = ctx.needs_input_grad[1:3]
        grad_hidden_SH = torch.empty_like(hidden_SH)
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=torch.float32) if needs_weight else None
        grad_bias_V = torch.zeros_like(bias_V, dtype=torch.float32) if needs_bias else None
        for chunk in _chunks(len(hidden_SH), len(weight_VH)):
            logits_CV = head.logits(hidden_SH[chunk]).div_(temperatures_S[chunk, None])
            grad_CV = logits_CV.sub_(normaliser_S[chunk, None]).exp_().mul_(-scale_S1[chunk])
            grad_CV.scatter_add_(1, token_ids_S[chunk, None], scale_S1[chunk])
            if grad_bias_V is not None:
                grad_bias_V += grad_CV.sum(dim=0)
            grad_CV = grad_CV.to(head.weight_VH.dtype)
            grad_hidden_SH[chunk] = grad_CV @ head.weight_VH
            if grad_weight_VH is not None:
                _accumulate(grad_weight_VH, grad_CV, hidden_SH[chunk])
        grad_weight = None if grad_weight_VH is None else grad_weight_VH.to(weight_VH.dtype)
        grad_bias = None if grad_bias_V is None else grad_bias_V.to(bias_V.dtype)
        return grad_hidden_SH, grad_weight, grad_bias, None, None, None


class _Head:
    """The output layer, in float32 if so wanted."""

    def __init__(self, weight_VH: Tensor, bias_V: Tensor | None, is_float32: bool) -> None:
        self.weight_VH = weight_VH.float() if is_float32 else weight_VH
        self._bias_V = bias_V

    def logits(self, hidden_CH: Tensor) -> Tensor:
        """[C, V] float32, a tensor of its own."""
        logits_CV = (hidden_CH.to(self.weight_VH.dtype) @ self.weight_VH.T).float()
        return logits_CV if self._bias_V is None else logits_CV.add_(self._bias_V)


def _accumulate(grad_weight_VH: Tensor, grad_CV: Tensor, hidden_CH: Tensor) -> None:
    hidden_CH = hidden_CH.to(grad_CV.dtype)
    if grad_CV.dtype == torch.float32:
        grad_weight_VH.addmm_(grad_CV.T, hidden_CH)
    else:
        grad_weight_VH += grad_CV.T @ hidden_CH


def _chunks(num_tokens: int, vocabulary_size: int) -> list[slice]:
    size = max(1, MAX_CHUNK_LOGITS // vocabulary_size)
    return [slice(start, start + size) for start in range(0, num_tokens, size)]
