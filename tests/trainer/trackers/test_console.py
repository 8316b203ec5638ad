"""The console's one line an update, and its bar in a terminal."""

import io

from rich.console import Console

from tests.trainer.metrics import METRICS
from trainer.trackers.console import ConsoleTracker, summary


def test_console_without_a_terminal_prints_updates_and_notes_only(capsys):
    with ConsoleTracker(num_updates=9) as tracker:
        tracker.waiting(2, ready=1, needed=16)
        tracker.training(2)
        tracker.update(METRICS)
        tracker.note("checkpoint of version 3")
    assert capsys.readouterr().out == summary(METRICS, 9) + "\ncheckpoint of version 3\n"


def test_summary_says_what_one_looks_for():
    text = summary(METRICS, 9)
    assert text.startswith("update 3/9  reward 0.500  success 0.25  lag 1  wait 2.0 s")
    assert "paused 63 ms" in text


def test_in_a_terminal_a_bar_counts_the_updates_and_says_what_is_awaited():
    console = Console(file=io.StringIO(), force_terminal=True, width=120, legacy_windows=False)
    with ConsoleTracker(9, console=console) as tracker:
        tracker.update(METRICS)
        tracker.waiting(3, ready=4, needed=16)
        tracker._progress.refresh()
        shown = console.file.getvalue()
    assert "3/9" in shown
    assert "waiting for rollouts, 4 of 16 groups" in shown


def test_without_the_console_among_the_trackers_notes_still_come(capsys):
    with ConsoleTracker(9, shows_updates=False) as tracker:
        tracker.update(METRICS)
        tracker.note("a [note]")
    assert capsys.readouterr().out == "a [note]\n"
