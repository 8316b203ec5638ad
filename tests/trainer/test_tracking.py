"""Files of JSON lines."""

import resource

import msgspec
import pytest

from tests.trainer.metrics import METRICS
from trainer.tracking import BLOCK_BYTES, JsonLines


def test_lines_are_appended_and_read_back(tmp_path):
    lines = JsonLines(tmp_path / "metrics.jsonl")
    assert lines.read() == []
    lines.append(METRICS)
    lines.append({"version": 4})
    assert lines.read() == [msgspec.to_builtins(METRICS, str_keys=True), {"version": 4}]


def test_a_line_that_a_crash_cut_short_is_dropped(tmp_path):
    lines = JsonLines(tmp_path / "metrics.jsonl")
    lines.append({"version": 1})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"vers')
    resumed = JsonLines(tmp_path / "metrics.jsonl")
    resumed.append({"version": 2})
    assert resumed.read() == [{"version": 1}, {"version": 2}]


@pytest.mark.parametrize("length", [0, 1, 3 * BLOCK_BYTES])
@pytest.mark.parametrize("torn", ["", "x", "y" * 2 * BLOCK_BYTES])
def test_whole_lines_stay_where_they_are_in_the_file(tmp_path, length, torn):
    path = tmp_path / "lines.jsonl"
    whole = '{"text": "' + "z" * length + '"}\n' if length else ""
    path.write_text(whole + torn)
    inode = path.stat().st_ino
    JsonLines(path)
    assert (path.read_text(), path.stat().st_ino) == (whole, inode)


def test_a_line_that_a_full_disk_cuts_short_leaves_the_others(tmp_path):
    lines = JsonLines(tmp_path / "lines.jsonl")
    lines.append({"version": 1})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            lines.append({"version": 2, "text": "x" * 100})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert lines.read() == [{"version": 1}]
