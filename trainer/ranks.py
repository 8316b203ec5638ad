"""The collectives of the data-parallel ranks. With one rank each of them does nothing."""

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
