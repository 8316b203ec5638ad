"""Durable checkpoints: each complete or absent, whatever is killed when.

    checkpoints/v00010/run_state.json   version, groups trained since the checkpoint before, model, ranks, books, small states
                       model/           a Hugging Face model: safetensors, configuration, tokenizer
                       deepspeed/       policy/, critic/: optimizer and module state, a file for each rank
                       ranks/           random number generators, a file for each rank
                .v00011.partial/        being written; renamed when all of it is on disk

With several machines the run directory lies on a file system that they share.

A save is COPYING → WRITING → durable or failed. Training stands still only while the state is copied to memory; a thread on each
rank writes it, and rank 0's renames once all of them are done. The next save waits for the one before.
"""

import errno
import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import msgspec
from safetensors import SafetensorError
from torch import Tensor

from shared.decoding import UNDECODABLE
from shared.errors import ConfigurationError
from shared.freed_memory import give_back
from trainer import ranks
from trainer.random_state import RandomState
from trainer.snapshots import Copier, SnapshotFile, snapshot

STATE_FILE = "run_state.json"
SPARE_BYTES = 2**18
"""Beside tensors, for a checkpoint's other files and the run's own."""
POLICY = "policy"
"""The name of the engine whose weights are exported."""
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


class Component(Protocol):
    """Something with a small state of JSON values that must survive, the same on every rank."""

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


class LedgerState(msgspec.Struct, frozen=True):
    """What continues the books if Redis is lost."""

    trained: int
    """Groups, over the whole lineage."""
    cursors: dict[str, int]
    """Index of each environment's next task."""


class RunState(msgspec.Struct, frozen=True):
    """What a checkpoint is of."""

    version: int
    group_ids: tuple[str, ...]
    """Groups trained since the checkpoint before this one, in this lineage."""
    fingerprint: str
    """Of the models, see `model.fingerprint`."""
    num_ranks: int
    ledger: LedgerState
    components: dict[str, dict[str, Any]]
    """Small states by name."""


@dataclass(frozen=True)
class SaveResult:
    """How a save ended."""

    version: int
    group_ids: tuple[str, ...]
    """Durable with it, or still not durable if it failed."""
    problem: str | None
    """None: it is durable."""


@dataclass(frozen=True)
class _Content:
    """What one rank writes."""

    final: Path
    files: Sequence[SnapshotFile]
    random_state: RandomState
    weights: Mapping[str, Tensor]
    """By Hugging Face name; empty on other ranks than 0."""
    state: RunState

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files) + sum(weight.nbytes for weight in self.weights.values())


class Checkpoints:
    """The checkpoints of one run directory. `save`, `wait` and `load` are collectives; rank 0 alone renames and removes."""

    def __init__(
        self, run_directory: Path, *, keep: int, fingerprint: str, model_path: Path, timeout: timedelta = timedelta(hours=1)
    ) -> None:
        """A collective. Args: keep: newest ones not removed. model_path: where the tokenizer's files are copied from.
        timeout: longest wait for the slowest rank's disk.
        """
        self._directory = run_directory / "checkpoints"
        self._keep = keep
        self._fingerprint = fingerprint
        self._model_path = model_path
        self._writers = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        # Of its own, because the writers meet while the training threads use theirs.
        self._meeting = ranks.Meeting(timeout)
        self._saving: Future[SaveResult] | None = None
        if ranks.rank() == 0:
            _remove_leftovers(self._directory)
        ranks.barrier()

    def newest(self) -> RunState | None:
        """The state to resume from. Raises: ConfigurationError if it is another model's or another number of ranks'."""
        complete = _complete(self._directory)
        if not complete:
            return None
        path = complete[-1]
        try:
            state = msgspec.json.decode((path / STATE_FILE).read_bytes(), type=RunState)
        except (OSError, *UNDECODABLE) as error:
            raise ConfigurationError(
                f"checkpoint {path} must have a readable {STATE_FILE}, and it is not: {error}; remove the checkpoint to resume "
                "from the one before, or give another run.directory"
            ) from error
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

    def load(self, engines: Mapping[str, Any], state: RunState, components: Mapping[str, Component]) -> None:
        """Weights, optimizers, random numbers and small states of `state` into this rank.

        Raises: ConfigurationError if the checkpoint lacks one of `engines`.
        """
        path = self._directory / _name(state.version)
        for name, engine in engines.items():
            if not (path / "deepspeed" / name).is_dir():
                raise ConfigurationError(
                    f"checkpoint {path} must hold the {name}'s state, and does not; resume with the settings that wrote it, or "
                    "give another run.directory"
                )
            engine.load_checkpoint(str(path / "deepspeed"), tag=name)
        for name, component in components.items():
            if name in state.components:
                component.restore(state.components[name])
        msgspec.msgpack.decode(_rank_file(path).read_bytes(), type=RandomState).restore()

    def save(
        self,
        engines: Mapping[str, Any],
        version: int,
        group_ids: Sequence[str],
        *,
        ledger: LedgerState,
        components: Mapping[str, Component],
    ) -> None:
        """Copies the state of `version` and begins to write it; `result` and `wait` tell the end.

        Args: engines: by name, one of them the policy. group_ids, ledger: of rank 0. Raises: RuntimeError if the save before was
        not asked for its result.
        """
        if self._saving is not None:
            raise RuntimeError(f"the save before that of version {version} must be waited for first")
        state = RunState(
            version=version,
            group_ids=tuple(group_ids),
            fingerprint=self._fingerprint,
            num_ranks=ranks.count(),
            ledger=ledger,
            components={name: component.state() for name, component in components.items()},
        )
        final = self._directory / _name(version)
        copier = Copier()
        content = _Content(
            final=final,
            files=[
                file
                for name, engine in engines.items()
                for file in snapshot(engine, _partial(final) / "deepspeed", tag=name, copier=copier)
            ],
            random_state=RandomState.capture(),
            weights=_weights(engines[POLICY].module, copier),
            state=state,
        )
        self._saving = self._writers.submit(self._write, content, engines[POLICY].module)

    def result(self) -> SaveResult | None:
        """The save that ended since the last call, if any; tells of each once. Each rank may see it at another time."""
        if self._saving is None or not self._saving.done():
            return None
        return self.wait()

    def wait(self) -> SaveResult | None:
        """The end of the save under way; None if there is none."""
        if self._saving is None:
            return None
        saving, self._saving = self._saving, None
        result = saving.result()
        give_back()  # The copies lay between what is still needed, and so the heap would grow from save to save.
        return result

    def close(self) -> None:
        """Lets a save under way end: what it writes is nobody's to finish later."""
        self._writers.shutdown()

    def _write(self, content: _Content, policy: Any) -> SaveResult:
        """In the thread of each rank."""
        partial = _partial(content.final)
        [num_bytes] = self._meeting.sums([content.num_bytes])
        problem = _attempt(lambda: self._write_own(content, policy, partial, num_bytes))
        [num_failed] = self._meeting.sums([int(problem is not None)])
        if ranks.rank() == 0:
            if num_failed == 0:
                problem = _attempt(lambda: self._complete(content.final))
            else:
                shutil.rmtree(partial, ignore_errors=True)
        [num_failed] = self._meeting.sums([int(problem is not None)])
        if num_failed and problem is None:
            problem = "another rank could not write its part"
        if problem is not None:
            problem = self._explained(content.final, num_bytes, problem)
        return SaveResult(content.state.version, content.state.group_ids, problem)

    def _write_own(self, content: _Content, policy: Any, partial: Path, num_bytes: int) -> None:
        # A disk filled to the brim, even for a while, would also fail the run's other files.
        if _free_bytes(content.final) < num_bytes + SPARE_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        own = _rank_file(partial)
        own.parent.mkdir(parents=True, exist_ok=True)
        own.write_bytes(msgspec.msgpack.encode(content.random_state))
        for file in content.files:
            file.write()
        for path in (own, *(file.path for file in content.files)):
            _sync(path)
        if ranks.rank() == 0:
            self._export(content.weights, policy, partial / "model")
            (partial / STATE_FILE).write_bytes(msgspec.json.encode(content.state))

    def _export(self, weights: Mapping[str, Tensor], policy: Any, path: Path) -> None:
        policy.causal_lm.save_pretrained(path, state_dict=dict(weights))
        for pattern in _TOKENIZER_FILES:
            for source in self._model_path.glob(pattern):
                shutil.copy(source, path)

    def _complete(self, final: Path) -> None:
        """Rank 0, when every rank's files are on disk."""
        make_durable(_partial(final), final)
        for path in _complete(self._directory)[: -self._keep]:
            _discard(path)

    def _explained(self, final: Path, num_bytes: int, problem: str) -> str:
        older = _complete(self._directory)
        kept = f"that of version {int(older[-1].name[1:])} stays the newest" if older else "there is none yet"
        return (
            f"the checkpoint {final} needs {num_bytes} bytes and must fit on its file system, which has {_free_bytes(final)} free: "
            f"{problem}; {kept}; free space there, or lower trainer.checkpoint.keep={self._keep}"
        )


def make_durable(partial: Path, final: Path) -> None:
    """`partial` and all in it to disk, and only then under the name of `final`."""
    for path in [*partial.rglob("*"), partial]:
        _sync(path)
    if final.exists():
        shutil.rmtree(final)
    partial.rename(final)
    _sync(final.parent)


def _attempt(work: Callable[[], None]) -> str | None:
    """What went wrong in `work`; None if nothing did. A checkpoint that cannot be written is no reason to lose the run."""
    try:
        work()
    except OSError as error:
        return os.strerror(error.errno) if error.errno else str(error)
    except SafetensorError as error:
        return str(error)
    except Exception as error:
        logging.getLogger(__name__).exception("a checkpoint could not be written")
        return f"{type(error).__name__}: {error}"
    return None


def _weights(policy: Any, copier: Copier) -> dict[str, Tensor]:
    """What rank 0 exports: each tensor by itself, since ZeRO's are slices of one, which safetensors refuses. A collective."""
    weights = {}
    for name, weight in policy.named_weights():
        if ranks.rank() == 0:
            weights[name] = copier.weight(weight)
    return weights


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


def _discard(path: Path) -> None:
    """An old checkpoint, under the name of an unfinished one first, so that what a crash leaves of it is removed at the next start.

    The newest is durable by now: what cannot be removed costs space, and no save.
    """
    try:
        shutil.rmtree(path.rename(_partial(path)))
    except OSError as error:
        logging.getLogger(__name__).warning("the old checkpoint %s could not be removed: %s", path, error)


def _remove_leftovers(directory: Path) -> None:
    """What a crash left unfinished."""
    for path in directory.glob(_partial(Path("v*")).name):
        shutil.rmtree(path)


def _free_bytes(path: Path) -> int:
    existing = next(parent for parent in path.parents if parent.exists())
    return shutil.disk_usage(existing).free


def _rank_file(checkpoint: Path) -> Path:
    return checkpoint / "ranks" / f"{ranks.rank():05d}.msgpack"


def _name(version: int) -> str:
    return f"v{version:05d}"


def _partial(final: Path) -> Path:
    return final.with_name(f".{final.name}.partial")
