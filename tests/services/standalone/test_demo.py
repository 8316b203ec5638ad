import errno
import io
from pathlib import Path

import pytest
from rich.console import Console

from services.standalone import demo
from services.standalone.demo_display import DemoDisplay
from services.standalone.observer import State
from shared.configuration import load
from shared.errors import ConfigurationError
from tests.services.standalone.run_directory import append, evaluation, update


def test_earlier_demo_is_kept_under_another_name(tmp_path):
    directory = tmp_path / "demo"
    directory.mkdir()
    (directory / "metrics.jsonl").write_text("{}\n")
    demo._make_room(directory, Console(file=io.StringIO()))
    assert list(directory.iterdir()) == []
    (kept,) = tmp_path.glob("demo-*")
    assert (kept / "metrics.jsonl").is_file()


def test_demos_run_file_has_every_path_in_its_directory(tmp_path):
    model = tmp_path / "policy"
    model.mkdir()
    (model / "config.json").write_text("{}")
    run_file = demo._write_run_file(tmp_path)
    assert demo.RUN_FILE_DIRECTORY not in run_file.read_text()
    configuration = load(run_file, overrides=demo.OVERRIDES, environment_variables={})
    assert configuration.run.directory == str(tmp_path)
    assert configuration.run.model_path == str(model)


def test_demo_outside_a_checkout_is_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "RUN_FILE", tmp_path / "examples" / "demo.yaml")
    with pytest.raises(ConfigurationError, match="run it from a clone"):
        demo._write_run_file(tmp_path)


@pytest.mark.parametrize("is_there", [False, True])
def test_directory_that_cannot_be_written_is_a_sentence(tmp_path, monkeypatch, is_there):
    if is_there:
        (tmp_path / "demo").mkdir()

    def refuse(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "rename" if is_there else "mkdir", refuse)
    with pytest.raises(ConfigurationError, match=r"--directory must be one that can be made and renamed, got .*demo: Read-only"):
        demo.run(tmp_path / "demo", seed=0, overrides=[])


def test_progress_without_a_terminal_is_a_line_for_each_event_once(tmp_path):
    shown = io.StringIO()
    with DemoDisplay(Console(file=shown, width=120), tmp_path, num_updates=2) as display:
        display.state_changed("redis", State.STARTING, 0.0)
        display.state_changed("redis", State.READY, 0.25)
        display.state_changed("trainer", State.STARTING, 0.0)
        display.state_changed("trainer", State.RUNNING, 0.0)
        append(tmp_path / "evaluations.jsonl", evaluation(0, 0.25))
        append(tmp_path / "metrics.jsonl", update(1))
        display.line_written("trainer", "update 1/2")
        append(tmp_path / "metrics.jsonl", update(2, success_rate=0.75))
        display.line_written("trainer", "update 2/2")
        display.line_written("trainer", "checkpoint of version 2")
    assert shown.getvalue().splitlines() == [
        "redis is ready after 0.2 s",
        "trainer has started",
        "unseen tasks after update 0: success 0.250 sampled",
        "update 1/2: success 0.50, reward 0.50, lag 1",
        "update 2/2: success 0.75, reward 0.50, lag 1",
    ]


def test_progress_on_a_terminal_is_bars(tmp_path):
    shown = io.StringIO()
    console = Console(file=shown, width=120, force_terminal=True)
    with DemoDisplay(console, tmp_path, num_updates=2) as display:
        display.state_changed("redis", State.STARTING, 0.0)
        display.state_changed("redis", State.READY, 0.25)
        display.state_changed("trainer", State.RUNNING, 0.0)
        append(tmp_path / "metrics.jsonl", update(1))
        display.line_written("trainer", "update 1/2")
    assert "training" in shown.getvalue()
    assert "1/2" in shown.getvalue()
