"""How buckets get from rank 0 into the engines of one group. A transport is a channel: chosen in the configuration, driven alike.

    with one channel: for each bucket: channel.send(bucket, load)

`broadcast` sends each bucket through a process group. `tensor` hands the engines, on the same node, a handle to the bucket's
memory: CUDA IPC of a GPU's, shared memory of the machine's. `disk` writes the whole set to a shared folder before anything is
paused, and sends its path.
"""

import base64
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.multiprocessing import reductions

from shared.errors import ConfigurationError, WeightUpdateError
from trainer.hub_client import GroupMember
from trainer.weight_buckets import Bucket
from trainer.weight_transport import WeightGroup

KEPT_SETS = 2
"""Sets of weights in a shared folder: the one in force and the one being written."""
SET_PREFIX = "weights-"
STORAGE_DEVICE = 6
"""Which argument of torch's `rebuild_cuda_tensor` is the GPU."""

T = TypeVar("T")
Load = Callable[[Mapping[str, object]], T]
"""Has the engines load a bucket, given what its transport says of it, and answers when all have."""


@dataclass(frozen=True)
class WrittenSet:
    """A whole set of weights in a folder."""

    path: Path
    is_last: bool = True


class Channel(Protocol):
    """Of one weight group, until it is closed or a send failed."""

    group_name: str

    def prepared(self, buckets: Iterator[Bucket], version: int) -> Iterator[Bucket | WrittenSet]:
        """What `send` takes, in order; what is asked for before the update begins costs no pause."""
        ...

    def send(self, part: Bucket | WrittenSet, load: Load[T]) -> T:
        """What `load` returns, when every engine has loaded it. Raises: WeightUpdateError, EngineError."""
        ...

    def close(self) -> None: ...


class BroadcastChannel:
    def __init__(self, group: WeightGroup, *, timeout_s: float) -> None:
        self.group_name = group.name
        self._group = group
        self._timeout_s = timeout_s
        self._is_closed = False

    def prepared(self, buckets: Iterator[Bucket], version: int) -> Iterator[Bucket | WrittenSet]:
        return buckets

    def send(self, part: Bucket | WrittenSet, load: Load[T]) -> T:
        """The broadcast and the request that makes engines receive it, at the same time; either one's failure ends both."""
        assert isinstance(part, Bucket)
        with ThreadPoolExecutor(max_workers=1) as requests:
            loading = requests.submit(load, layout(part))
            try:
                self._group.broadcast(
                    part.data,
                    timeout_s=self._timeout_s,
                    is_hopeless=lambda: loading.done() and loading.exception() is not None,
                )
            except WeightUpdateError:
                # Engines that wait for the rest of this broadcast are let go by the end of the group.
                self.close()
                loading.result()
                raise
            return loading.result()

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._group.close()


class TensorChannel:
    """One handle for each rank of each engine, because taking one over uses it up."""

    def __init__(self, group_name: str, members: tuple[GroupMember, ...]) -> None:
        self.group_name = group_name
        self._members = members

    def prepared(self, buckets: Iterator[Bucket], version: int) -> Iterator[Bucket | WrittenSet]:
        for bucket in buckets:
            # Moves the machine's memory to where engines can map it, which copies it; a GPU's is there already.
            with _shared_by_name():
                bucket.data.share_memory_()  # type: ignore[no-untyped-call]
            yield bucket

    def send(self, part: Bucket | WrittenSet, load: Load[T]) -> T:
        assert isinstance(part, Bucket)
        return load(
            {"handles": {member.id: [handle(part) for _ in range(member.tensor_parallel_size)] for member in self._members}}
        )

    def close(self) -> None:
        return


class DiskChannel:
    def __init__(self, group_name: str, directory: Path) -> None:
        self.group_name = group_name
        self._directory = directory

    def prepared(self, buckets: Iterator[Bucket], version: int) -> Iterator[Bucket | WrittenSet]:
        yield WrittenSet(write_set(buckets, self._directory, version))

    def send(self, part: Bucket | WrittenSet, load: Load[T]) -> T:
        assert isinstance(part, WrittenSet)
        return load({"path": str(part.path)})

    def close(self) -> None:
        return


def layout(bucket: Bucket) -> dict[str, object]:
    """What an engine has to know to receive a bucket."""
    return {"names": bucket.names, "dtypes": bucket.dtypes, "shapes": bucket.shapes, "load_format": "flattened_bucket"}


def handle(bucket: Bucket) -> str:
    """SGLang's serialized bucket in base64: a pickle with a reference to the memory, which its own unpickler takes apart."""
    metadata = []
    start = 0
    for name, dtype, shape in zip(bucket.names, bucket.dtypes, bucket.shapes, strict=True):
        kind = getattr(torch, dtype)
        size = torch.Size(shape).numel() * kind.itemsize
        place = {"start_idx": start, "end_idx": start + size, "numel": size}
        metadata.append(SimpleNamespace(name=name, shape=torch.Size(shape), dtype=kind, **place))
        start += size
    buffer = BytesIO()
    with _shared_by_name():
        _HandlePickler(buffer).dump({"flattened_tensor": bucket.data, "metadata": metadata})
    return base64.b64encode(buffer.getvalue()).decode()


class _HandlePickler(ForkingPickler):
    """Names a GPU by its UUID, as SGLang 0.5.23 takes it back: its number may be another one in an engine that sees other GPUs."""

    def reducer_override(self, obj: object) -> Any:
        if not (isinstance(obj, Tensor) and obj.is_cuda):
            return NotImplemented
        rebuild, arguments = reductions.reduce_tensor(obj)  # type: ignore[no-untyped-call]
        uuid = str(torch.cuda.get_device_properties(obj.device).uuid)
        return rebuild, (*arguments[:STORAGE_DEVICE], uuid, *arguments[STORAGE_DEVICE + 1 :])


_SHARING = threading.Lock()
"""Two threads in `_shared_by_name`, one that sends and one that gathers, would take each other's changes for what was there."""


@contextmanager
def _shared_by_name() -> Iterator[None]:
    """Memory shared within it is found by its name: a file descriptor reaches only this process's own children.

    torch starts a daemon for it, which outlives this process as long as an engine has the memory mapped. It must not inherit the
    pipes that this process's output goes to, whose readers wait for their end.
    """
    with _SHARING:
        strategy = torch.multiprocessing.get_sharing_strategy()  # type: ignore[no-untyped-call]
        sys.stdout.flush()
        sys.stderr.flush()
        kept = {number: os.dup(number) for number in (1, 2)}
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            for number in kept:
                os.dup2(nowhere, number)
            torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
            yield
        finally:
            torch.multiprocessing.set_sharing_strategy(strategy)  # type: ignore[no-untyped-call]
            for number, copy in kept.items():
                os.dup2(copy, number)
                os.close(copy)
            os.close(nowhere)


def write_set(buckets: Iterator[Bucket], directory: Path, version: int) -> Path:
    """The weights as safetensors in a folder that appears at once and whole. Older ones but the last go.

    Raises: WeightUpdateError if the folder cannot be written to.
    """
    final = directory / f"{SET_PREFIX}{version:08d}-{os.getpid()}"
    partial = directory / f".{final.name}.partial"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for index, bucket in enumerate(buckets):
            save_file(tensors_of(bucket), partial / f"part-{index:05d}.safetensors")
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        for old in sorted(directory.glob(f"{SET_PREFIX}*"), key=lambda path: path.stat().st_mtime)[:-KEPT_SETS]:
            shutil.rmtree(old, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise WeightUpdateError(
            f"trainer.weight_push.directory must be a folder that the trainer can write to, got {str(directory)!r}: {error}"
        ) from error
    return final


def tensors_of(bucket: Bucket) -> dict[str, Tensor]:
    """The bucket's tensors by name; they share its memory."""
    tensors = {}
    start = 0
    for name, dtype, shape in zip(bucket.names, bucket.dtypes, bucket.shapes, strict=True):
        kind = getattr(torch, dtype)
        size = torch.Size(shape).numel() * kind.itemsize
        tensors[name] = bucket.data[start : start + size].view(kind).reshape(shape)
        start += size
    return tensors


def require_directory(directory: str | None) -> Path:
    """Raises: ConfigurationError unless it is an absolute path of a folder that exists."""
    path = Path(directory or "")
    if not path.is_absolute() or not path.is_dir():
        raise ConfigurationError(
            f"trainer.weight_push.directory must be the absolute path of a folder that trainer and engines share, got "
            f"{directory!r}; create it, mount it on every machine under the same path, and give that"
        )
    return path
