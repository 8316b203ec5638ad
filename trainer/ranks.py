"""The collectives of the data-parallel ranks. With one rank each of them does nothing."""

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor


def rank() -> int:
    return dist.get_rank()


def count() -> int:
    return dist.get_world_size()


def sum_in_place(tensor: Tensor) -> None:
    if count() > 1:
        dist.all_reduce(tensor, op=dist.ReduceOp.SUM)


def max_in_place(tensor: Tensor) -> None:
    if count() > 1:
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)


def barrier() -> None:
    if count() > 1:
        dist.barrier()


def from_rank_zero(message: bytes, device: torch.device) -> bytes:
    """Rank 0's `message` on every rank; what the others pass is ignored."""
    if count() == 1:
        return message
    length = torch.tensor([len(message)], dtype=torch.int64, device=device)
    dist.broadcast(length, src=0)
    buffer = torch.empty(int(length.item()), dtype=torch.uint8, device=device)
    if rank() == 0:
        buffer.copy_(torch.frombuffer(bytearray(message), dtype=torch.uint8))
    dist.broadcast(buffer, src=0)
    return buffer.cpu().numpy().tobytes()


def gathered(words: Sequence[str]) -> list[str]:
    """The words of every rank, by rank."""
    if count() == 1:
        return list(words)
    lists: list[list[str]] = [[] for _ in range(count())]
    dist.all_gather_object(lists, list(words))
    return [word for each in lists for word in each]


class Meeting:
    """Sums over the ranks for a thread beside training, whose collectives it must not get between."""

    def __init__(self, timeout: timedelta) -> None:
        """A collective. Args: timeout: longest wait for the last rank."""
        self._group = dist.new_group(backend="gloo", timeout=timeout) if count() > 1 else None

    def sums(self, values: Sequence[int]) -> list[int]:
        if self._group is None:
            return list(values)
        total = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(total, op=dist.ReduceOp.SUM, group=self._group)
        return [int(value) for value in total.tolist()]
