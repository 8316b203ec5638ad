"""Tasks: what an episode is about. A task source is a pure function from index to task, so that any process can run any index."""

import asyncio
import functools
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
from arro3.core import Table
from arro3.io import read_parquet_async
from arro3.io.store import LocalStore

from shared.environment_spec import ParquetTasks, SeedTasks, Tasks
from shared.errors import ConfigurationError


class Task(msgspec.Struct, frozen=True):
    """What one episode is about."""

    task_id: str
    seed: int
    data: Mapping[str, Any]
    """The row of a dataset; empty where tasks are seeds."""


class TaskSource(Protocol):
    """Tasks by index, 0, 1, 2, … without end: past `count` they come again."""

    @property
    def count(self) -> int:
        """Tasks that differ."""
        ...

    def task(self, index: int) -> Task:
        """The task of an index; the same one in every process."""
        ...


class SeedTaskSource:
    """Seeds start … start + count - 1, in order, over and over."""

    def __init__(self, spec: SeedTasks) -> None:
        self._start = spec.start
        self.count = spec.count

    def task(self, index: int) -> Task:
        seed = self._start + index % self.count
        return Task(task_id=str(seed), seed=seed, data={})


class ParquetTaskSource:
    """Rows of a Parquet file; every epoch has its own order, drawn from the run's seed, unless `shuffle` is off.

    A row's number is its task id and its seed, whatever the order.
    """

    def __init__(self, table: Table, *, shuffle: bool, seed: int) -> None:
        self._table = table
        self._shuffle = shuffle
        self._seed = seed
        self.count = table.num_rows

    def task(self, index: int) -> Task:
        epoch, position = divmod(index, self.count)
        row = int(_epoch_order(self.count, self._seed, epoch)[position]) if self._shuffle else position
        data = {name: self._table.column(name)[row].as_py() for name in self._table.column_names}
        return Task(task_id=str(row), seed=row, data=data)


@functools.lru_cache(maxsize=8)
def _epoch_order(count: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """[count] row numbers in the order of one epoch."""
    return np.random.default_rng([seed, epoch]).permutation(count)


def open_tasks(spec: Tasks, *, seed: int, in_file_order: bool = False) -> TaskSource:
    """The task source of a spec. `in_file_order` reads a dataset unshuffled, as evaluations do.

    Raises: ConfigurationError if the dataset cannot be read or is empty.
    """
    if isinstance(spec, SeedTasks):
        return SeedTaskSource(spec)
    return ParquetTaskSource(_read_table(spec), shuffle=spec.shuffle and not in_file_order, seed=seed)


def _read_table(spec: ParquetTasks) -> Table:
    path = Path(spec.path)
    if not path.is_file():
        raise ConfigurationError(
            f"tasks.path must be a Parquet file, got {spec.path!r}, and there is no {str(path.absolute())!r} where the agents run; put it "
            "there, in a composed stack under examples/, which its agents read"
        )
    try:
        table = _read(path)
    except Exception as error:  # arro3 raises no type of its own.
        raise ConfigurationError(f"tasks.path must be a Parquet file, and {spec.path!r} cannot be read as one: {error}") from error
    if table.num_rows == 0:
        raise ConfigurationError(f"tasks.path must be a Parquet file with rows, and {spec.path!r} has none")
    return table


def _read(path: Path) -> Table:
    # arro3's blocking reader panics on a file that is not Parquet, its asynchronous one raises; the caller may run a loop already.
    # The link gives the file a plain name: the store would look for one with an é or a # under its percent-encoding.
    with TemporaryDirectory() as folder, ThreadPoolExecutor(1) as thread:
        (Path(folder) / "tasks").symlink_to(path.resolve())

        async def read() -> Table:
            return await read_parquet_async("tasks", store=LocalStore(folder))

        return thread.submit(lambda: asyncio.run(read())).result()
