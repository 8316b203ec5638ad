"""Attention over packed rows: no token sees another row, no padding, no [N, N] mask.

Shapes: N packed tokens of all rows, D size of a head.
"""

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

from shared.errors import ConfigurationError

AttentionKind = Literal["flash", "sdpa", "unpacked"]

SDPA_BY_ROW = "headrace_sdpa_by_row"
"""Our function's name among transformers' attention implementations. It has no mask function there, so models make none."""


def attention_kind(
    wanted: Literal["auto", "flash", "sdpa", "unpacked"], *, dtype: str, is_cuda: bool, has_flash: bool
) -> AttentionKind:
    """`wanted`, with auto decided: flash attention where it is installed and can be used, else `sdpa`.

    Raises: ConfigurationError for flash where it cannot be used.
    """
    can_flash = is_cuda and has_flash and dtype == "bfloat16"
    if wanted == "auto":
        return "flash" if can_flash else "sdpa"
    if wanted == "flash" and not can_flash:
        found = f"dtype {dtype}, {'a GPU' if is_cuda else 'no GPU'}, flash-attn {'installed' if has_flash else 'not installed'}"
        raise ConfigurationError(
            f"trainer.attention=flash needs trainer.dtype=bfloat16, a GPU and the package flash-attn, got {found}; use auto"
        )
    return wanted


def sdpa_by_row(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    row_lengths: tuple[int, ...],
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each row of a pack, by torch's fused kernel on one row after the other.

    Args: query, key, value: [1, heads, N, D], the latter two with as many heads as the model has or a divisor of it.
        row_lengths: add up to N. sliding_window: tokens that one sees, itself included.
    Returns: [1, N, heads, D]. Raises: ConfigurationError for what the kernel cannot do.
    """
    beyond = {name: arguments.get(name) for name in ("softcap", "s_aux", "position_bias") if arguments.get(name) is not None}
    if beyond or attention_mask is not None or arguments.get("is_causal") is False:
        raise ConfigurationError(
            f"trainer.attention must be one that {type(module).__name__} can be computed with, and sdpa has no "
            f"{', '.join(beyond) or 'attention other than causal'}; use flash or unpacked"
        )
    is_grouped = key.shape[1] != query.shape[1]
    rows = zip(*(torch.split(tensor, list(row_lengths), dim=2) for tensor in (query, key, value)), strict=True)
    outputs = []
    for query_row, key_row, value_row in rows:
        length = query_row.shape[2]
        window = _window_mask(length, sliding_window, query.device) if sliding_window and length > sliding_window else None
        outputs.append(
            functional.scaled_dot_product_attention(
                *(query_row, key_row, value_row),
                attn_mask=window,
                is_causal=window is None,
                dropout_p=dropout,
                scale=scaling,
                enable_gqa=is_grouped,
            )
        )
    return torch.cat(outputs, dim=2).transpose(1, 2), None


def _window_mask(length: int, window: int, device: torch.device) -> Tensor:
    """[length, length] bool, True where row sees column: itself and the window - 1 tokens before it."""
    age = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
    return (age >= 0) & (age < window)


AttentionInterface.register(SDPA_BY_ROW, sdpa_by_row)
