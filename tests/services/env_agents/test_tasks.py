from datetime import UTC, datetime

import pyarrow
import pyarrow.parquet
import pytest

from services.env_agents.datasets import TaskOpener
from shared.environment_spec import DatasetColumns, JsonlTasks, ParquetTasks, SeedTasks


def open_tasks(spec, *, seed=0, **options):
    return TaskOpener(lambda messages, tools: [], seed=seed).open(spec, [], **{"needs_prompts": False, **options})


@pytest.fixture
def rows(tmp_path) -> str:
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"question": [f"q{n}" for n in range(10)], "answer": list(range(10))}), path)
    return str(path)


@pytest.fixture
def only_row(tmp_path):
    """The task of a Parquet file with one row."""

    def task(row, **columns):
        path = tmp_path / "row.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), path)
        return open_tasks(ParquetTasks(str(path), columns=DatasetColumns(**columns))).task(0)

    return task


def test_seeds_are_counted_from_start_and_come_again():
    source = open_tasks(SeedTasks(start=5, count=3))
    assert [source.task(index).seed for index in range(5)] == [5, 6, 7, 5, 6]
    assert source.task(1).task_id == "6"


def test_every_epoch_holds_every_row_once_in_an_order_of_its_own(rows):
    source = open_tasks(ParquetTasks(rows))
    epochs = [[source.task(index).task_id for index in range(10 * epoch, 10 * epoch + 10)] for epoch in range(3)]
    assert all(sorted(epoch, key=int) == [str(n) for n in range(10)] for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_a_task_depends_on_index_and_seed_only(rows):
    one, same, other = (open_tasks(ParquetTasks(rows), seed=seed) for seed in (7, 7, 8))
    indexes = [13, 2, 25, 2]
    assert [one.task(index) for index in indexes] == [same.task(index) for index in indexes]
    assert [one.task(index).task_id for index in range(10)] != [other.task(index).task_id for index in range(10)]


def test_rows_reach_the_task_as_a_dict(rows):
    assert open_tasks(ParquetTasks(rows), in_file_order=True).task(3).data == {"question": "q3", "answer": 3}


def test_file_order_ignores_shuffle(rows):
    source = open_tasks(ParquetTasks(rows, shuffle=True), in_file_order=True)
    assert [source.task(index).task_id for index in range(12)] == [str(n % 10) for n in range(12)]


def test_columns_of_every_kind_reach_the_task(only_row):
    row = {"text": "q", "number": 1.5, "list": [1, 2], "nested": {"a": "b"}, "none": None, "when": datetime(2026, 1, 2, tzinfo=UTC)}
    assert only_row(row).data == row


def test_verls_columns_are_found_without_naming_them(only_row):
    prompt = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1 + 1?"}]
    row = {"prompt": prompt, "reward_model": {"style": "rule", "ground_truth": "2"}, "extra_info": {"index": 7, "split": "train"}}
    task = only_row(row)
    assert (list(task.prompt), task.answer) == (prompt, "2")
    assert task.data["extra_info"] == {"index": 7, "split": "train"}


def test_rolls_columns_are_found_by_their_names(only_row):
    row = {"messages": '[{"role": "user", "content": "1 + 1?"}]', "ground_truth": "2", "tag": "arithmetic", "a.b": 3}
    task = only_row(row, prompt="messages", answer="ground_truth")
    assert (list(task.prompt), task.answer, task.data["tag"]) == ([{"role": "user", "content": "1 + 1?"}], "2", "arithmetic")
    assert only_row(row, prompt="messages", answer="a.b").answer == 3, "a name with a dot in it comes before a nested column"
    assert only_row(row, answer="tag.nothing").answer is None


@pytest.mark.parametrize("text", ["1 + 1?", "[1, 2] has how many elements?", "[1, 2]"])
def test_a_prompt_of_text_is_a_message_of_the_user(only_row, text):
    assert list(only_row({"prompt": text}).prompt) == [{"role": "user", "content": text}]


def test_keys_that_parquet_fills_with_null_are_not_the_messages_own(only_row):
    prompt = [{"role": "user", "content": "?"}, {"role": "tool", "name": "clock", "content": "12:00"}]
    assert list(only_row({"prompt": prompt}).prompt) == prompt


def test_lines_of_json_are_rows_and_blank_lines_are_none(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "a", "reward_model": {"ground_truth": [1]}}\r\n\n{"prompt": "b\\u2028", "n": 1e40}\n')
    source = open_tasks(JsonlTasks(str(path)), in_file_order=True)
    assert source.count == 2
    assert source.task(0).answer == [1]
    assert source.task(1).prompt[0]["content"] == "b\u2028"


@pytest.mark.parametrize("name", ["a b.parquet", "é#1.parquet", "100%25.parquet"])
def test_file_of_any_name_is_read(tmp_path, name):
    pyarrow.parquet.write_table(pyarrow.table({"question": ["q"]}), tmp_path / name)
    assert open_tasks(ParquetTasks(str(tmp_path / name))).task(0).data == {"question": "q"}
