"""Datasets as task sources: each row is looked at once, when the environment is loaded, and those that cannot be used are left out.

Which rows those are depends on the file, the spec and the chat format only. So every process of a run, now or after a restart, maps
an index to the same task, and the ledger's cursor, which counts indexes, is all that a dataset needs to be resumed.
"""

import logging
import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from services.env_agents.chat import Message
from services.env_agents.dataset_rows import BadRowError, DatasetRows, read_rows
from services.env_agents.tasks import DatasetTaskSource, SeedTaskSource, Task, TaskSource, row_task
from shared.environment_spec import DatasetTasks, SeedTasks, Tasks
from shared.errors import ConfigurationError

_PROGRESS_S = 10.0
_NUM_EXAMPLES = 3

_logger = logging.getLogger(__name__)

ToolSpecs = Sequence[Mapping[str, Any]]
RenderPrompt = Callable[[Sequence[Message], ToolSpecs], list[int]]
"""Token ids of messages and tools, as the policy reads them."""


class DatasetCounts(msgspec.Struct, frozen=True):
    """What became of a dataset's rows when it was loaded."""

    rows: int
    unreadable: int = 0
    """Left out because they cannot be read."""
    overlong: int = 0
    """Left out because their prompt is longer than max_prompt_length."""


class TaskOpener:
    """Opens what specs say tasks are. A dataset that is in use and did not change on disk is not read again."""

    def __init__(self, render_prompt: RenderPrompt, *, seed: int) -> None:
        self._render_prompt = render_prompt
        self._seed = seed
        self._source_by_key: weakref.WeakValueDictionary[bytes, TaskSource] = weakref.WeakValueDictionary()
        self._counts_by_source: weakref.WeakKeyDictionary[TaskSource, DatasetCounts] = weakref.WeakKeyDictionary()

    def open(self, spec: Tasks, tools: ToolSpecs, *, needs_prompts: bool, in_file_order: bool = False) -> TaskSource:
        """The task source of a spec. Blocks for as long as it reads and tokenises.

        Args:
            tools: what the policy reads beside a prompt; of no account where prompts are not measured.
            needs_prompts: a row without one cannot be used, as where the environment takes its messages from the row.
            in_file_order: unshuffled, as evaluations read a dataset.
        Raises: ConfigurationError if the dataset cannot be used.
        """
        if isinstance(spec, SeedTasks):
            if needs_prompts:
                raise ConfigurationError(
                    "this environment takes its prompts from a dataset, and tasks are seeds; set tasks.kind to parquet or jsonl"
                )
            return SeedTaskSource(spec)
        key = msgspec.json.encode([spec, tools, needs_prompts, in_file_order, _stamp(spec.path)])
        source = self._source_by_key.get(key)
        if source is None:
            source = self._read(spec, tools, needs_prompts=needs_prompts, in_file_order=in_file_order)
            self._source_by_key[key] = source
        return source

    def counts(self, source: TaskSource) -> DatasetCounts | None:
        """Of a source that was opened here; None for seeds."""
        return self._counts_by_source.get(source)

    def _read(self, spec: DatasetTasks, tools: ToolSpecs, *, needs_prompts: bool, in_file_order: bool) -> TaskSource:
        rows = read_rows(spec)
        inspection = _Inspection(spec, rows, needs_prompts=needs_prompts or spec.max_prompt_length is not None)
        inspection.run(lambda task: self._prompt_length(task, tools))
        inspection.require_usable()
        numbers = np.asarray(inspection.usable, dtype=np.int64)
        shuffle = spec.shuffle and not in_file_order
        source = DatasetTaskSource(rows, numbers, columns=spec.columns, shuffle=shuffle, seed=self._seed)
        self._counts_by_source[source] = inspection.counts
        return source

    def _prompt_length(self, task: Task, tools: ToolSpecs) -> int:
        try:
            return len(self._render_prompt(task.prompt, tools))
        except Exception as error:  # Chat formats raise what they like about messages in an order they do not know.
            raise BadRowError(f"the chat format cannot render it: {type(error).__name__}: {error}") from error


class _Inspection:
    """One look at every row of a dataset."""

    def __init__(self, spec: DatasetTasks, rows: DatasetRows, *, needs_prompts: bool) -> None:
        self._spec = spec
        self._rows = rows
        self._needs_prompts = needs_prompts
        self.usable: list[int] = []
        self._problems: list[str] = []
        self._num_unreadable = 0
        self._num_overlong = 0

    @property
    def counts(self) -> DatasetCounts:
        return DatasetCounts(len(self._rows), self._num_unreadable, self._num_overlong)

    def run(self, prompt_length: Callable[[Task], int]) -> None:
        reported = time.monotonic()
        for number in range(len(self._rows)):
            self._look_at(number, prompt_length)
            if time.monotonic() - reported > _PROGRESS_S:
                reported = time.monotonic()
                _logger.info("%s: looked at %d of %d rows", self._spec.path, number + 1, len(self._rows))
        if self._num_unreadable or self._num_overlong:
            _logger.warning(
                "%s: of %d rows %d cannot be read and %d are over max_prompt_length; they are left out%s",
                self._spec.path,
                len(self._rows),
                self._num_unreadable,
                self._num_overlong,
                "".join(f"; {problem}" for problem in self._problems),
            )

    def _look_at(self, number: int, prompt_length: Callable[[Task], int]) -> None:
        longest = self._spec.max_prompt_length
        try:
            task = row_task(self._rows, number, self._spec.columns)
            if self._needs_prompts and not task.prompt:
                raise BadRowError(f"it has no prompt in the column {self._spec.columns.prompt!r}")
            is_overlong = longest is not None and prompt_length(task) > longest
        except BadRowError as error:
            self._num_unreadable += 1
            if len(self._problems) < _NUM_EXAMPLES:
                self._problems.append(f"row {number}: {error}")
            return
        if is_overlong:
            self._num_overlong += 1
        else:
            self.usable.append(number)

    def require_usable(self) -> None:
        """Raises: ConfigurationError if too many rows are bad, or none is left."""
        path, examples = self._spec.path, "; ".join(self._problems)
        if self._num_unreadable > self._spec.max_bad_rows:
            raise ConfigurationError(
                f"at most tasks.max_bad_rows = {self._spec.max_bad_rows} rows may be unreadable, and {path!r} has "
                f"{self._num_unreadable} of {len(self._rows)} ({examples}); correct them or tasks.columns, or raise the limit"
            )
        if self._num_overlong and not self._spec.filter_overlong_prompts:
            raise ConfigurationError(
                f"prompts must have at most tasks.max_prompt_length = {self._spec.max_prompt_length} tokens, and {path!r} has "
                f"{self._num_overlong} longer ones; raise it, or leave them out with tasks.filter_overlong_prompts: true"
            )
        if not self.usable:
            raise ConfigurationError(
                f"a dataset must have rows that can be used, and all {len(self._rows)} of {path!r} were left out: "
                f"{self._num_overlong} over tasks.max_prompt_length = {self._spec.max_prompt_length}, {self._num_unreadable} "
                f"unreadable; raise the limit, or correct tasks.columns"
            )


def _stamp(path: str) -> tuple[int, int]:
    """Changes when the file does; zeros where there is none."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):  # A path with a NUL in it is a ValueError.
        return (0, 0)
    return (status.st_mtime_ns, status.st_size)
