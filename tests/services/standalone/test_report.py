import io
import json

import pytest
from rich.console import Console

from services.standalone import report
from services.standalone.accounting import Account
from services.standalone.run_files import Transcript
from shared.errors import TrainingError
from tests.services.standalone.run_directory import append, evaluation, lineage, update

ACCOUNT = Account(finished=16, recorded=16, in_stream=0, trained=16, failed=0, discarded=0)


@pytest.fixture
def finished_run(tmp_path):
    append(tmp_path / "metrics.jsonl", update(1, weight_pause_s=0.05), update(2, weight_pause_s=0.15, wait_prev_gen_s=0.75))
    append(tmp_path / "lineage.jsonl", lineage(1, "a", lag_max=0), lineage(2, "b", lag_max=1))
    for greedy in (False, True):
        append(tmp_path / "evaluations.jsonl", evaluation(0, 0.3, greedy=greedy), evaluation(2, 0.9, greedy=greedy))
    (tmp_path / "transcripts").mkdir()
    for version, reward in ((0, 0), (1, 0), (2, 1)):
        text = f"calculator · task 5 · reward {reward} · completed\n\nuser: what is 2 + 3? [bold]"
        (tmp_path / "transcripts" / f"v{version:05d}.txt").write_text(text)
    return tmp_path


def test_last_line_is_one_json_object_with_the_promised_keys(finished_run, capsys):
    report.show(Console(file=io.StringIO()), finished_run, ACCOUNT, minutes=1.5)
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {
        "success_before": 0.3,
        "success_after": 0.9,
        "updates": 2,
        "episodes": 16,
        "minutes": 1.5,
        "lag_max": 1,
        "weight_pause_ms_p50": 100.0,
        "wait_prev_gen_s_mean": 0.5,
        "trajectories_lost": 0,
    }


def test_report_shows_table_transcripts_and_where_everything_is(finished_run, capsys):
    shown = io.StringIO()
    report.show(Console(file=shown, width=100), finished_run, ACCOUNT, minutes=1.5)
    text = shown.getvalue()
    for expected in (
        "30.0%",
        "90.0%",
        "before (version 0)",
        "middle (version 1)",
        "after (version 2)",
        "[bold]",
        str(finished_run),
    ):
        assert expected in text
    assert (finished_run / "learning_curve.png").read_bytes().startswith(b"\x89PNG")


def test_run_without_evaluations_is_a_sentence(tmp_path):
    append(tmp_path / "metrics.jsonl", update(1))
    with pytest.raises(TrainingError, match="two evaluations"):
        report.show(Console(file=io.StringIO()), tmp_path, ACCOUNT, minutes=1.0)


def test_task_that_was_learnt_is_the_one_shown():
    by_version = {
        0: [Transcript("easy", 1.0, "right"), Transcript("hard", 0.0, "wrong")],
        9: [Transcript("easy", 1.0, "right"), Transcript("hard", 1.0, "right at last")],
    }
    assert [excerpt.text for excerpt in report.excerpts(by_version)] == ["wrong", "right at last", "right at last"]


def test_instructions_that_were_shown_already_are_left_out():
    first = "CONTEXT\nYou have a tool.\n\nPOLICY\n533"
    assert report.without_shared_start("CONTEXT\nYou have a tool.\n\nPOLICY\n614", first) == "… as above\n\nPOLICY\n614"
    assert report.without_shared_start("something else", first) == "something else"
    assert report.without_shared_start(first, first) == first
