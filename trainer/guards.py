"""Updates whose loss or gradient is no finite number: none of it may reach the weights.

A loss that is not finite makes the gradient NaN, and a gradient whose global norm is not finite is what DeepSpeed itself leaves
out, on all ranks alike: optimizer, weights and version stay as they were. The groups of such an update are discarded, because they
would do the same again.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class SkippedStep:
    """A step that DeepSpeed left out."""

    cause: Literal["loss", "gradient"]
    entry_ids: tuple[str, ...]
    """Stream entries whose own loss is not finite; with a finite loss and another gradient, all of the batch."""
    after_steps: int
    """Steps of the same update that were taken before."""


class SkippedUpdates:
    """Counts updates with a skipped step, the same on every rank."""

    def __init__(self, *, max_in_a_row: int) -> None:
        self._max_in_a_row = max_in_a_row
        self.in_a_row = 0
        self.total = 0

    @property
    def are_too_many(self) -> bool:
        return self.in_a_row >= self._max_in_a_row

    def count(self, *, is_skipped: bool) -> None:
        self.in_a_row = self.in_a_row + 1 if is_skipped else 0
        self.total += is_skipped

    def state(self) -> dict[str, Any]:
        return {"in_a_row": self.in_a_row, "total": self.total}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.in_a_row, self.total = state["in_a_row"], state["total"]


def infectious(loss: Tensor, outputs_BT: Tensor) -> Tensor:
    """`loss`; if its value is not finite, with a gradient of NaN for every parameter, past the clamps that would make 0 of it.

    Args: outputs_BT: of the model, what the loss was computed from.
    """
    return loss if loss.isfinite() else loss + torch.nan * outputs_BT.sum()


def non_finite_rows(loss_BT: Tensor, entry_ids: Sequence[str]) -> Iterator[str]:
    """The entries whose rows have a loss that is not finite. Rows beyond `entry_ids` are padding.

    Args: loss_BT: weighted, 0 where the loss mask is.
    """
    is_finite_B = loss_BT.isfinite().all(dim=1).tolist()
    return (entry_id for entry_id, is_finite in zip(entry_ids, is_finite_B, strict=False) if not is_finite)
