"""Tasks: what an episode is about. A task source is a pure function from index to task, so that any process can run any index."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from services.env_agents.chat import Message, as_messages
from services.env_agents.dataset_rows import BadRowError, DatasetRows, value_at
from shared.environment_spec import DatasetColumns, SeedTasks


class Task(msgspec.Struct, frozen=True):
    """What one episode is about."""

    task_id: str
    seed: int
    data: Mapping[str, Any]
    """The row of a dataset; empty where tasks are seeds."""
    prompt: Sequence[Message] = ()
    """The chat messages in the row's prompt column; none where it has no such column."""
    answer: Any = None
    """The ground truth in the row's answer column."""


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


class DatasetTaskSource:
    """Usable rows of a file; every epoch has its own order, drawn from the run's seed, unless `shuffle` is off.

    A row's number in the file is its task id and its seed, whatever the order and whatever was left out.
    """

    def __init__(
        self, rows: DatasetRows, numbers: npt.NDArray[np.int64], *, columns: DatasetColumns, shuffle: bool, seed: int
    ) -> None:
        """Args: numbers: [count] of the usable rows, ascending."""
        self._rows = rows
        self._numbers = numbers
        self._columns = columns
        self._shuffle = shuffle
        self._seed = seed
        self.count = len(numbers)

    def task(self, index: int) -> Task:
        epoch, position = divmod(index, self.count)
        if self._shuffle:
            position = int(_epoch_order(self.count, self._seed, epoch)[position])
        number = int(self._numbers[position])
        return row_task(self._rows, number, self._columns)


def row_task(rows: DatasetRows, number: int, columns: DatasetColumns) -> Task:
    """The task that a row is. Raises: BadRowError if it cannot be read, or its prompt column holds no prompt."""
    data = rows.row(number)
    prompt = value_at(data, columns.prompt)
    try:
        messages = () if prompt is None else tuple(as_messages(prompt))
    except ValueError as error:
        raise BadRowError(f"{columns.prompt}: {error}") from error
    return Task(task_id=str(number), seed=number, data=data, prompt=messages, answer=value_at(data, columns.answer))


@functools.lru_cache(maxsize=8)
def _epoch_order(count: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """[count] positions in the order of one epoch."""
    return np.random.default_rng([seed, epoch]).permutation(count)
