"""Weights as bytes: a stream of buckets that is gathered while it is sent, in bounded memory.

The layout is SGLang 0.5.23's `flattened_bucket`: one uint8 tensor with the named tensors' bytes one after the other.
"""

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

NUM_BUFFERS = 2

Observe = Callable[[str, tuple[int, ...], Tensor], None]
"""Called with each weight's name, shape, and its bytes as they are sent, [bytes] uint8."""


@dataclass(frozen=True)
class WeightSource:
    """Where weights come from, as often as a push has to begin anew."""

    gather: Callable[[], Iterable[tuple[str, Tensor]]]
    """Every weight once, by its Hugging Face name, whole. A collective where the ranks share them out."""
    num_elements: int

    @staticmethod
    def of(weights: Iterable[tuple[str, Tensor]]) -> "WeightSource":
        """Weights that are whole in this process."""
        kept = list(weights)
        return WeightSource(lambda: kept, sum(weight.numel() for _, weight in kept))


@dataclass(frozen=True)
class Bucket:
    """Named tensors that travel together, in order. `data` [bytes] uint8 is overwritten by the bucket after the next."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    """torch's names without the `torch.` prefix."""
    shapes: tuple[tuple[int, ...], ...]
    data: Tensor
    is_last: bool


@dataclass
class _Open:
    """A bucket that is being filled."""

    data: Tensor
    names: list[str] = field(default_factory=list)
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    used: int = 0

    def closed(self, dtype: torch.dtype, *, is_last: bool) -> Bucket:
        name = str(dtype).removeprefix("torch.")
        return Bucket(tuple(self.names), (name,) * len(self.names), tuple(self.shapes), self.data[: self.used], is_last)


def stream(
    source: WeightSource, *, dtype: torch.dtype, bucket_bytes: int, device: torch.device, observe: Observe | None = None
) -> Generator[Bucket, None, None]:
    """The weights of `source` in `dtype` as buckets of at most `bucket_bytes` on `device`, in two buffers by turns.

    A larger tensor is a bucket of its own. Ask for a bucket only when the one before the last is sent. Who does not ask for all of
    them has to close it: a gathering that is a collective has to be gone through.
    """
    capacity = min(bucket_bytes, source.num_elements * dtype.itemsize)
    buffers: dict[int, Tensor] = {}
    num_opened = 0

    def opened(size: int) -> _Open:
        nonlocal num_opened
        turn = num_opened % NUM_BUFFERS
        num_opened += 1
        if size > capacity:
            return _Open(torch.empty(size, dtype=torch.uint8, device=device))
        if turn not in buffers:
            buffers[turn] = torch.empty(capacity, dtype=torch.uint8, device=device)
        return _Open(buffers[turn])

    current: _Open | None = None
    for name, weight in source.gather():
        size = weight.numel() * dtype.itemsize
        if current is not None and current.used + size > len(current.data):
            yield current.closed(dtype, is_last=False)
            current = None
        current = current or opened(size)
        part = current.data[current.used : current.used + size]
        part.view(dtype).copy_(weight.reshape(-1))
        if observe is not None:
            observe(name, tuple(weight.shape), part)
        current.names.append(name)
        current.shapes.append(tuple(weight.shape))
        current.used += size
    if current is not None:
        yield current.closed(dtype, is_last=True)
