from datetime import UTC, datetime

import pyarrow
import pyarrow.parquet
import pytest

from services.env_agents.tasks import open_tasks
from shared.environment_spec import ParquetTasks, SeedTasks
from shared.errors import ConfigurationError


@pytest.fixture
def rows(tmp_path) -> str:
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"question": [f"q{n}" for n in range(10)], "answer": list(range(10))}), path)
    return str(path)


def test_seeds_are_counted_from_start_and_come_again():
    source = open_tasks(SeedTasks(start=5, count=3), seed=0)
    assert [source.task(index).seed for index in range(5)] == [5, 6, 7, 5, 6]
    assert source.task(1).task_id == "6"


def test_every_epoch_holds_every_row_once_in_an_order_of_its_own(rows):
    source = open_tasks(ParquetTasks(rows), seed=0)
    epochs = [[source.task(index).task_id for index in range(10 * epoch, 10 * epoch + 10)] for epoch in range(3)]
    assert all(sorted(epoch, key=int) == [str(n) for n in range(10)] for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_a_task_depends_on_index_and_seed_only(rows):
    one, same, other = (open_tasks(ParquetTasks(rows), seed=seed) for seed in (7, 7, 8))
    indexes = [13, 2, 25, 2]
    assert [one.task(index) for index in indexes] == [same.task(index) for index in indexes]
    assert [one.task(index).task_id for index in range(10)] != [other.task(index).task_id for index in range(10)]


def test_rows_reach_the_task_as_a_dict(rows):
    assert open_tasks(ParquetTasks(rows), seed=0, in_file_order=True).task(3).data == {"question": "q3", "answer": 3}


def test_file_order_ignores_shuffle(rows):
    source = open_tasks(ParquetTasks(rows, shuffle=True), seed=0, in_file_order=True)
    assert [source.task(index).task_id for index in range(12)] == [str(n % 10) for n in range(12)]


def test_columns_of_every_kind_reach_the_task(tmp_path):
    row = {"text": "q", "number": 1.5, "list": [1, 2], "nested": {"a": "b"}, "none": None, "when": datetime(2026, 1, 2, tzinfo=UTC)}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "rows.parquet")
    assert open_tasks(ParquetTasks(str(tmp_path / "rows.parquet")), seed=0).task(0).data == row


@pytest.mark.parametrize("name", ["a b.parquet", "é#1.parquet", "100%25.parquet"])
def test_file_of_any_name_is_read(tmp_path, name):
    pyarrow.parquet.write_table(pyarrow.table({"question": ["q"]}), tmp_path / name)
    assert open_tasks(ParquetTasks(str(tmp_path / name)), seed=0).task(0).data == {"question": "q"}


@pytest.mark.parametrize("make", ["missing", "text", "empty", "broken"])
def test_file_that_holds_no_tasks_is_refused_with_a_sentence(tmp_path, make):
    path = tmp_path / "tasks.parquet"
    if make == "text":
        path.write_text("not parquet")
    elif make == "empty":
        pyarrow.parquet.write_table(pyarrow.table({"question": pyarrow.array([], pyarrow.string())}), path)
    elif make == "broken":
        pyarrow.parquet.write_table(pyarrow.table({"question": ["a"] * 100}), path)
        content = bytearray(path.read_bytes())
        content[4:-8] = bytes(len(content) - 12)
        path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"tasks\.path must be a Parquet file"):
        open_tasks(ParquetTasks(str(path)), seed=0)
