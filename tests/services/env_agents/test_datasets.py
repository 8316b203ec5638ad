import json
import logging

import pyarrow
import pyarrow.parquet
import pytest
import redis.asyncio

from services.env_agents.datasets import DatasetCounts, TaskOpener
from shared.environment_spec import JsonlTasks, ParquetTasks, SeedTasks
from shared.errors import ConfigurationError
from shared.ledger import AdmissionLedger

TOOLS = [{"type": "function", "function": {"name": "clock", "description": "The time.", "parameters": {"type": "object"}}}]


@pytest.fixture
def opener(renderer):
    return TaskOpener(renderer.prompt, seed=0)


@pytest.fixture
def lines(tmp_path):
    """Writes rows, or bytes as they are, into a file of JSON lines."""

    def write(rows) -> str:
        path = tmp_path / "rows.jsonl"
        path.write_bytes(b"\n".join(row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows))
        return str(path)

    return write


def task_ids(source) -> list[str]:
    return sorted((source.task(index).task_id for index in range(source.count)), key=int)


BAD_ROWS = [b"{", b"[1]", b'{"prompt": [{"role": "judge", "content": "?"}]}', b'{"prompt": []}', b'{"prompt": 3}', b"\xff\xfe"]


@pytest.mark.parametrize("bad", BAD_ROWS)
def test_row_that_cannot_be_read_is_left_out_and_counted(opener, lines, bad, caplog):
    source = opener.open(JsonlTasks(lines([{"prompt": "a"}, bad, {"prompt": "c"}])), [], needs_prompts=False)
    assert task_ids(source) == ["0", "2"], "rows keep their numbers"
    assert opener.counts(source) == DatasetCounts(rows=3, unreadable=1)
    assert "of 3 rows 1 cannot be read and 0 are over max_prompt_length; they are left out; row 1:" in caplog.text


def test_too_many_bad_rows_refuse_the_dataset_with_examples(opener, lines):
    spec = JsonlTasks(lines([{"prompt": "a"}, *BAD_ROWS[:3]]), max_bad_rows=2)
    with pytest.raises(ConfigurationError, match=r"at most tasks\.max_bad_rows = 2 .* has 3 of 4 \(row 1: a line must be a JSON"):
        opener.open(spec, [], needs_prompts=False)


def test_row_without_a_prompt_is_bad_only_where_prompts_are_needed(opener, lines):
    spec = JsonlTasks(lines([{"prompt": "a"}, {"question": "b"}]))
    assert opener.open(spec, [], needs_prompts=False).count == 2
    assert opener.open(spec, [], needs_prompts=True).count == 1
    with pytest.raises(ConfigurationError, match=r"all 1 of .* 1 unreadable; raise the limit, or correct tasks\.columns"):
        opener.open(JsonlTasks(lines([{"question": "b"}])), [], needs_prompts=True)
    with pytest.raises(ConfigurationError, match=r"tasks are seeds; set tasks\.kind to parquet or jsonl"):
        opener.open(SeedTasks(), [], needs_prompts=True)


@pytest.mark.parametrize("tools", [[], TOOLS])
def test_prompts_are_measured_as_the_policy_reads_them(opener, renderer, lines, tools):
    rows = [{"prompt": "x" * length} for length in (1, 20, 21, 40)]
    longest = len(renderer.prompt([{"role": "user", "content": "x" * 20}], tools))
    source = opener.open(JsonlTasks(lines(rows), max_prompt_length=longest), tools, needs_prompts=False)
    assert task_ids(source) == ["0", "1"]
    assert opener.counts(source) == DatasetCounts(rows=4, overlong=2)


def test_overlong_prompts_refuse_the_dataset_where_they_are_not_to_be_filtered(opener, lines):
    spec = JsonlTasks(lines([{"prompt": "x"}, {"prompt": "x" * 99}]), max_prompt_length=80, filter_overlong_prompts=False)
    with pytest.raises(ConfigurationError, match=r"max_prompt_length = 80 tokens, and .* has 1 longer ones; raise it, or leave"):
        opener.open(spec, [], needs_prompts=False)


def test_limit_that_no_prompt_meets_is_a_sentence(opener, lines):
    with pytest.raises(ConfigurationError, match=r"all 1 of .* were left out: 1 over tasks\.max_prompt_length = 2"):
        opener.open(JsonlTasks(lines([{"prompt": "x"}]), max_prompt_length=2), [], needs_prompts=False)


def test_prompt_that_the_chat_format_refuses_is_a_bad_row(lines):
    def refuse(messages, tools):
        if messages[0]["role"] != "user":
            raise TypeError("must begin with the user")
        return [1]

    rows = [{"prompt": [{"role": "assistant", "content": "?"}]}, {"prompt": "x"}]
    source = TaskOpener(refuse, seed=0).open(JsonlTasks(lines(rows), max_prompt_length=9), [], needs_prompts=False)
    assert task_ids(source) == ["1"]


def test_every_process_maps_indexes_alike_whatever_was_left_out(renderer, lines):
    longest = len(renderer.prompt([{"role": "user", "content": "xxxx"}], []))
    spec = JsonlTasks(lines([{"prompt": "x" * (n % 7)} if n % 5 else b"{" for n in range(40)]), max_prompt_length=longest)
    sources = [TaskOpener(renderer.prompt, seed=3).open(spec, [], needs_prompts=False) for _ in range(2)]
    indexes = range(3 * sources[0].count)
    first, second = ([source.task(index).task_id for index in indexes] for source in sources)
    assert first == second
    assert 0 < sources[0].count < 32, "some rows were left out"
    assert all(first.count(task_id) == 3 for task_id in first), "each row once an epoch"


def test_dataset_is_read_again_only_when_it_changed(opener, lines):
    spec = JsonlTasks(lines([{"prompt": "a"}]))
    source = opener.open(spec, [], needs_prompts=False)
    assert opener.open(spec, [], needs_prompts=False) is source
    lines([{"prompt": "a"}, {"prompt": "b"}])
    assert opener.open(spec, [], needs_prompts=False).count == 2


def test_long_look_at_a_dataset_tells_how_far_it_is(opener, lines, monkeypatch, caplog):
    monkeypatch.setattr("services.env_agents.datasets._PROGRESS_S", 0.0)
    with caplog.at_level(logging.INFO):
        opener.open(JsonlTasks(lines([{"prompt": "a"}] * 3)), [], needs_prompts=False)
    assert "looked at 2 of 3 rows" in caplog.text


async def test_cursor_goes_on_after_a_restart_so_that_an_epoch_plays_each_row_once(renderer, lines, redis_url, keys):
    spec = JsonlTasks(lines([{"prompt": str(n)} for n in range(12)]))
    played = []
    for process in range(4):
        async with redis.asyncio.Redis.from_url(redis_url) as client:
            ledger = AdmissionLedger(client, keys)
            await ledger.configure(async_generation_ratio=1.0, batch_groups=20)
            source = TaskOpener(renderer.prompt, seed=1).open(spec, [], needs_prompts=True)
            for group in range(3):
                record = await ledger.admit(
                    group_id=f"{process}-{group}", environment="a", group_size=1, owner=str(process), lease_ms=60_000
                )
                played.append(source.task(record.task_index).task_id)
    assert sorted(played, key=int) == [str(n) for n in range(12)]


@pytest.mark.parametrize("make", ["missing", "text", "empty", "broken"])
def test_file_that_holds_no_tasks_is_refused_with_a_sentence(opener, tmp_path, make):
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
        opener.open(ParquetTasks(str(path)), [], needs_prompts=False)


def test_file_of_json_lines_must_have_some(opener, lines):
    with pytest.raises(ConfigurationError, match=r"tasks\.path must be a file of JSON lines with rows, and .* has none"):
        opener.open(JsonlTasks(lines([b"", b" "])), [], needs_prompts=False)
