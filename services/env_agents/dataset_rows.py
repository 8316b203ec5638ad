"""Rows of a dataset's file, each as a dict: Parquet and JSON Lines."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import msgspec
from arro3.core import Table
from arro3.io import read_parquet_async
from arro3.io.store import LocalStore

from shared.environment_spec import DatasetTasks, ParquetTasks
from shared.errors import ConfigurationError

_decode_object = msgspec.json.Decoder(dict[str, Any]).decode


class BadRowError(ValueError):
    """A row that cannot be read; the message says why."""


class DatasetRows(Protocol):
    """All rows of a file by number, as they stand in it."""

    def __len__(self) -> int: ...

    def row(self, number: int) -> dict[str, Any]:
        """Raises: BadRowError."""
        ...


class ParquetRows:
    """The rows of an Arrow table."""

    def __init__(self, table: Table) -> None:
        self._column_by_name = {name: table.column(name) for name in table.column_names}
        self._count = table.num_rows

    def __len__(self) -> int:
        return self._count

    def row(self, number: int) -> dict[str, Any]:
        try:
            return {name: column[number].as_py() for name, column in self._column_by_name.items()}
        except Exception as error:  # arro3 raises no type of its own.
            raise BadRowError(f"{type(error).__name__}: {error}") from error


class JsonlRows:
    """The lines of a file that are not blank; each is decoded when it is asked for."""

    def __init__(self, content: bytes) -> None:
        self._lines = [line for line in content.splitlines() if line.strip()]

    def __len__(self) -> int:
        return len(self._lines)

    def row(self, number: int) -> dict[str, Any]:
        try:
            return _decode_object(self._lines[number])
        except (msgspec.DecodeError, RecursionError) as error:
            raise BadRowError(f"a line must be a JSON object: {error}") from error
        except UnicodeDecodeError as error:
            raise BadRowError(f"a line must be UTF-8: {error}") from error


def read_rows(spec: DatasetTasks) -> DatasetRows:
    """The file of a spec. Raises: ConfigurationError if it cannot be read or has no rows."""
    kind = "a Parquet file" if isinstance(spec, ParquetTasks) else "a file of JSON lines"
    path = Path(spec.path)
    if not path.is_file():
        raise ConfigurationError(
            f"tasks.path must be {kind}, got {spec.path!r}, and there is no {str(path.absolute())!r} where the agents run; put it "
            "there, in a composed stack under examples/, which its agents read"
        )
    try:
        rows: DatasetRows = ParquetRows(_read_table(path)) if isinstance(spec, ParquetTasks) else JsonlRows(path.read_bytes())
    except Exception as error:  # arro3 raises no type of its own.
        raise ConfigurationError(f"tasks.path must be {kind}, and {spec.path!r} cannot be read as one: {error}") from error
    if len(rows) == 0:
        raise ConfigurationError(f"tasks.path must be {kind} with rows, and {spec.path!r} has none")
    return rows


def value_at(row: dict[str, Any], column: str) -> Any:
    """What a row has in a column, or None: by its whole name, else through nested columns at the dots."""
    if column in row:
        return row[column]
    value: Any = row
    for part in column.split("."):
        if not isinstance(value, dict):
            return None
        value = value.get(part)
    return value


def _read_table(path: Path) -> Table:
    # arro3's blocking reader panics on a file that is not Parquet, its asynchronous one raises; the caller may run a loop already.
    # The link gives the file a plain name: the store would look for one with an é or a # under its percent-encoding.
    with TemporaryDirectory() as folder, ThreadPoolExecutor(1) as thread:
        (Path(folder) / "rows").symlink_to(path.resolve())

        async def read() -> Table:
            return await read_parquet_async("rows", store=LocalStore(folder))

        return thread.submit(lambda: asyncio.run(read())).result()
