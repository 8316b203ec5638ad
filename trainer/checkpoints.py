"""Durable checkpoints: each complete or absent, whatever is killed when.

    checkpoints/v00010/run_state.json   version, groups trained since the checkpoint before, model, ranks
                       model/           a Hugging Face model: safetensors, configuration, tokenizer
                       deepspeed/       optimizer and module state, a file for each rank
                .v00011.partial/        being written; renamed when all of it is on disk

With several machines the run directory lies on a file system that they share.
"""

import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from shared.errors import ConfigurationError
from trainer import ranks

STATE_FILE = "run_state.json"
DEEPSPEED_TAG = "deepspeed"
_NAME = re.compile(r"^v(\d{5,})$")
_TOKENIZER_FILES = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "*.model",
)


class RunState(msgspec.Struct, frozen=True):
    """What a checkpoint is of."""

    version: int
    group_ids: tuple[str, ...]
    """Groups trained since the checkpoint before this one, in this lineage."""
    fingerprint: str
    """Of the model, see Policy.fingerprint."""
    num_ranks: int


class Checkpoints:
    """The checkpoints of one run directory. `save` and `load` are collectives; rank 0 alone renames and removes."""

    def __init__(self, run_directory: Path, *, keep: int, fingerprint: str, model_path: Path) -> None:
        """Args: keep: newest ones not removed. model_path: where the tokenizer's files are copied from."""
        self._directory = run_directory / "checkpoints"
        self._keep = keep
        self._fingerprint = fingerprint
        self._model_path = model_path

    def newest(self) -> RunState | None:
        """The state to resume from. Raises: ConfigurationError if it is another model's or another number of ranks'."""
        complete = _complete(self._directory)
        if not complete:
            return None
        path = complete[-1]
        state = msgspec.json.decode((path / STATE_FILE).read_bytes(), type=RunState)
        if state.fingerprint != self._fingerprint:
            raise ConfigurationError(
                f"checkpoint {path} must be of the model in run.model_path, {self._fingerprint}, got {state.fingerprint}; "
                "give that model, or another run.directory"
            )
        if state.num_ranks != ranks.count():
            raise ConfigurationError(
                f"checkpoint {path} must be resumed with as many ranks as wrote it, {state.num_ranks}, got {ranks.count()}"
            )
        return state

    def require_none(self) -> None:
        """For a run that must not resume. Raises: ConfigurationError if the directory holds a checkpoint."""
        if complete := _complete(self._directory):
            raise ConfigurationError(
                f"run.directory must hold no checkpoint with trainer.checkpoint.resume=never, got {complete[-1]}; "
                "give another run.directory, remove it, or set resume to auto"
            )

    def load(self, engine: Any, state: RunState) -> None:
        """Weights and optimizer of `state` into the DeepSpeed engine."""
        engine.load_checkpoint(str(self._directory / _name(state.version)), tag=DEEPSPEED_TAG)

    def save(self, engine: Any, version: int, group_ids: Sequence[str]) -> None:
        """Makes `version` durable, then removes what is older than the newest `keep`, and what a crash left unfinished."""
        final = self._directory / _name(version)
        state = RunState(version, tuple(group_ids), self._fingerprint, ranks.count())
        if ranks.rank() == 0:
            with atomic_directory(final) as partial:
                ranks.barrier()
                engine.save_checkpoint(str(partial), tag=DEEPSPEED_TAG, save_latest=False)
                ranks.barrier()
                self._export(engine.module, partial / "model")
                (partial / STATE_FILE).write_bytes(msgspec.json.encode(state))
            leftovers = self._directory.glob(_partial(Path("v*")).name)
            for path in [*_complete(self._directory)[: -self._keep], *leftovers]:
                shutil.rmtree(path)
        else:
            ranks.barrier()
            engine.save_checkpoint(str(_partial(final)), tag=DEEPSPEED_TAG, save_latest=False)
            ranks.barrier()
            engine.module.join_gathering()
        ranks.barrier()

    def _export(self, policy: Any, path: Path) -> None:
        """A copy of its own for each tensor: ZeRO's parameters are slices of one, which safetensors refuses."""
        weights = {name: weight.cpu().clone() for name, weight in policy.named_weights()}
        policy.causal_lm.save_pretrained(path, state_dict=weights)
        for pattern in _TOKENIZER_FILES:
            for source in self._model_path.glob(pattern):
                shutil.copy(source, path)


@contextmanager
def atomic_directory(final: Path) -> Iterator[Path]:
    """A folder to fill, which appears as `final` once all of it is on disk, or not at all."""
    partial = _partial(final)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    yield partial
    for path in [*partial.rglob("*"), partial]:
        _sync(path)
    if final.exists():
        shutil.rmtree(final)
    partial.rename(final)
    _sync(final.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _complete(directory: Path) -> list[Path]:
    """Oldest version first."""
    found = [path for path in directory.glob("v*") if _NAME.match(path.name) and (path / STATE_FILE).is_file()]
    return sorted(found, key=lambda path: int(path.name[1:]))


def _name(version: int) -> str:
    return f"v{version:05d}"


def _partial(final: Path) -> Path:
    return final.with_name(f".{final.name}.partial")
