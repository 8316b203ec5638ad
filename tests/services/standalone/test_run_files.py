import pytest

from services.standalone import run_files
from tests.services.standalone.run_directory import append, evaluation, lineage, update


def test_files_that_do_not_exist_yet_hold_nothing(tmp_path):
    assert run_files.updates(tmp_path) == []
    assert run_files.lineage(tmp_path) == []
    assert run_files.evaluations(tmp_path, greedy=False) == []
    assert run_files.transcripts(tmp_path) == {}


def test_later_line_of_a_version_counts(tmp_path):
    append(tmp_path / "lineage.jsonl", lineage(1, "a"), lineage(2, "b"), lineage(2, "c"))
    assert [line.group_ids for line in run_files.lineage(tmp_path)] == [("a",), ("c",)]


def test_line_that_is_not_written_to_its_end_is_left_out(tmp_path):
    append(tmp_path / "metrics.jsonl", update(1))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"update": 2, "vers')
    assert [line.version for line in run_files.updates(tmp_path)] == [1]


def test_success_is_over_the_episodes_of_all_environments(tmp_path):
    line = evaluation(4, 0.5)
    line["results"]["lookup"] = {"episodes": 30, "mean_reward": 1.0, "success_rate": 1.0, "outcomes": {}}
    append(tmp_path / "evaluations.jsonl", line, evaluation(4, 0.9, greedy=True))
    (sampled,) = run_files.evaluations(tmp_path, greedy=False)
    assert sampled.success_rate == pytest.approx((0.5 * 10 + 1.0 * 30) / 40)


def test_transcripts_are_read_back_by_version_and_task(tmp_path):
    folder = tmp_path / "transcripts"
    folder.mkdir()
    first = "calculator · task 17 + 4 · reward 0 · truncated\n\nuser: 17 + 4?\n"
    second = "calculator · task 9 · reward 1 · completed\n\nuser: 9?\n"
    (folder / "v00012.txt").write_text(f"{first}\n\n{second}")
    assert run_files.transcripts(tmp_path) == {
        12: [
            run_files.Transcript("17 + 4", 0.0, "user: 17 + 4?"),
            run_files.Transcript("9", 1.0, "user: 9?"),
        ]
    }
