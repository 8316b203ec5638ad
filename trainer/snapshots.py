"""A checkpoint's content in memory, copied while training stands still, written while it goes on.

DeepSpeed decides what a rank's files hold; `SnapshotEngine` takes the place of the part of it that writes them.
"""

import copy
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from torch import Tensor


@dataclass(frozen=True)
class SnapshotFile:
    """What `torch.save` shall write to `path`."""

    path: Path
    content: Any
    num_bytes: int
    """Of its tensors."""

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Through Python's file, whose errors say what the operating system said; torch's own writer hides a full disk.
        with self.path.open("wb") as file:
            try:
                torch.save(self.content, file)
            except RuntimeError as error:
                # After a failed write torch still ends its archive, and fails at that too.
                if isinstance(error.__context__, OSError):
                    raise error.__context__ from None
                raise


class SnapshotEngine(TorchCheckpointEngine):  # type: ignore[misc] # DeepSpeed has no types.
    """Collects copies of what DeepSpeed saves, and touches no disk; loads as DeepSpeed does."""

    def __init__(self, copier: "Copier") -> None:
        super().__init__()
        self._copier = copier
        self.files: list[SnapshotFile] = []

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Folders are made when files are written: an error of one rank here would leave the others in a collective."""

    def save(self, state_dict: Any, path: str) -> None:
        before = self._copier.num_bytes
        content = self._copier.copy(state_dict)
        self.files.append(SnapshotFile(Path(path), content, self._copier.num_bytes - before))


def snapshot(engine: Any, directory: Path, *, tag: str, copier: "Copier") -> list[SnapshotFile]:
    """This rank's files of a DeepSpeed checkpoint, in memory. A collective."""
    collector = SnapshotEngine(copier)
    engine.checkpoint_engine = collector
    # It would copy its conversion scripts into the folder at once; model/ is what they are for.
    engine._copy_recovery_script = lambda save_path: None
    engine.save_checkpoint(str(directory), tag=tag, save_latest=False)
    return collector.files


class Copier:
    """Tensors into memory of their own, each once however often it is named; everything else by value."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._copies: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}

    def copy(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._copy_tensor(value)
        if type(value) in (dict, OrderedDict):
            return type(value)((key, self.copy(item)) for key, item in value.items())
        if type(value) in (list, tuple):
            return type(value)(self.copy(item) for item in value)
        return copy.deepcopy(value)

    def _copy_tensor(self, tensor: Tensor) -> Tensor:
        key = _place(tensor)
        if key not in self._copies or tensor.numel() == 0:
            # The original is kept too, so that its address is nobody else's meanwhile.
            self._copies[key] = (tensor, tensor.detach().to("cpu", copy=True))
            self.num_bytes += tensor.numel() * tensor.element_size()
        return self._copies[key][1]

    def weight(self, tensor: Tensor) -> Tensor:
        """A contiguous copy, shared with what was copied before if that is the same memory; `tensor` may be a temporary one."""
        known = self._copies.get(_place(tensor))
        return (known[1] if known else tensor.detach().to("cpu", copy=True)).contiguous()


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
