import io
import json

import msgspec
import pytest
import yaml
from rich.console import Console

from services.standalone import environments
from services.standalone.command_line import main
from tests.services.standalone.services_at import json_service

PROBLEM = {
    "outcome": "environment_error",
    "detail": "Traceback:\n  line 3\nKeyError: 'celsius'",
    "at": "2026-03-01T12:00:00Z",
    "process": "node-1:77",
}
WEATHER = {
    "name": "weather",
    "import_path": "examples.weather:Weather",
    "url": None,
    "weight": 0.5,
    "is_paused": False,
    "tasks": {"kind": "seeds", "start": 0, "count": 10},
    "statistics": {"episodes": 4, "success_rate": 0.75, "mean_reward": 0.5, "outcomes": {"timeout": 1, "completed": 3}},
    "last_problem": PROBLEM,
}
REMOTE = {
    **WEATHER,
    "name": "remote",
    "import_path": None,
    "url": "ws://envs:8000",
    "is_paused": True,
    "statistics": {"episodes": 0, "success_rate": None, "mean_reward": None, "outcomes": {}},
    "last_problem": None,
}


@pytest.fixture
def run_file(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(f"run: {{id: x, directory: {tmp_path}/out, model_path: nowhere}}\ntrainer: {{num_updates: 1}}\n")
    return path


@pytest.fixture
def command(run_file, monkeypatch):
    """Runs `headrace environments …` against the agents of a test."""

    def run(agents, *arguments):
        monkeypatch.setenv("HEADRACE_AGENTS_URL", agents.url)
        return main(["environments", *arguments, "--config", str(run_file)])

    return run


def test_the_agents_token_goes_with_every_request(command, monkeypatch, capsys):
    monkeypatch.setenv("HEADRACE_AGENTS_TOKEN", "s3cret")
    with json_service({"GET /environments": (200, [WEATHER]), "DELETE /environments/weather": (204, None)}) as agents:
        assert command(agents, "list") == 0
        command(agents, "remove", "weather")
    assert set(agents.authorizations) == {"Bearer s3cret"}
    assert "s3cret" not in capsys.readouterr().out


@pytest.mark.parametrize("action", [[], ["list"]])
def test_list_has_a_row_for_each_with_how_it_goes_and_below_where_it_is(command, capsys, action):
    with json_service({"GET /environments": (200, [WEATHER, REMOTE])}) as agents:
        assert command(agents, *action) == 0
    header, weather, remote, weather_details, remote_details = capsys.readouterr().out.splitlines()
    assert header.split("  ")[0] == "environment"
    for expected in ("weather", "0.5", "no", "0.75", "0.50", "3 completed, 1 timeout"):
        assert expected in weather
    for expected in ("remote", "yes", "–"):
        assert expected in remote
    assert weather_details == (
        "weather: examples.weather:Weather; last problem: environment_error: KeyError: 'celsius' (2026-03-01T12:00:00Z, node-1:77)"
    )
    assert remote_details == "remote: ws://envs:8000"


def test_frame_fits_a_narrow_terminal_without_a_broken_word():
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    console.print(environments.overview(console, msgspec.convert([WEATHER], list[environments.Description])))
    lines = console.file.getvalue().splitlines()
    assert all(word in lines[1] for word in environments.COLUMNS)
    assert "│ weather     │ 0.5    │ no     │ 4        │ 0.75    │ 0.50   │ 3 completed," in lines[3]
    assert lines[-2].startswith("weather: examples.weather:Weather; last problem: environment_error: KeyError:")


@pytest.mark.parametrize("action", [[], ["list"], ["add"], ["remove"]])
def test_usage_shows_the_run_file_as_required(capsys, action):
    with pytest.raises(SystemExit):
        main(["environments", *action, "--help"])
    usage = capsys.readouterr().out
    assert usage.startswith(" ".join(["usage: headrace environments", *action]) + " [-h] --config FILE")
    assert "[--config" not in usage


def test_json_is_the_agents_answer(command, capsys):
    with json_service({"GET /environments": (200, [WEATHER])}) as agents:
        assert command(agents, "--json") == 0
    assert json.loads(capsys.readouterr().out) == [WEATHER]


def test_show_prints_the_whole_spec_and_a_traceback_as_lines(command, capsys):
    with json_service({"GET /environments/weather": (200, WEATHER)}) as agents:
        assert command(agents, "show", "weather") == 0
    text = capsys.readouterr().out
    assert yaml.safe_load(text) == WEATHER
    assert "\n    KeyError: 'celsius'\n" in text


@pytest.mark.parametrize(
    ("arguments", "request_line", "body", "sentence"),
    [
        (["pause", "weather"], "PATCH /environments/weather", {"is_paused": True}, "weather is paused"),
        (["resume", "weather"], "PATCH /environments/weather", {"is_paused": False}, "weather gets new groups again"),
        (["weight", "weather", "0.5"], "PATCH /environments/weather", {"weight": 0.5}, "weather has weight 0.5"),
    ],
)
def test_change_is_a_patch_of_that_key_alone(command, capsys, arguments, request_line, body, sentence):
    with json_service({request_line: (200, WEATHER)}) as agents:
        assert command(agents, *arguments) == 0
    assert agents.received == [(request_line, body)]
    assert sentence in capsys.readouterr().out


def test_remove_is_a_delete(command, capsys):
    with json_service({"DELETE /environments/weather": (204, b"")}) as agents:
        assert command(agents, "remove", "weather", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"removed": "weather"}


@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_add_sends_the_spec_of_a_file(command, capsys, tmp_path, suffix):
    spec = {"name": "weather", "import_path": "examples.weather:Weather", "weight": 0.5}
    file = tmp_path / f"weather.{suffix}"
    file.write_text(json.dumps(spec) if suffix == "json" else yaml.dump(spec))
    with json_service({"POST /environments": (201, WEATHER)}) as agents:
        assert command(agents, "add", str(file)) == 0
    assert agents.received == [("POST /environments", spec)]
    assert capsys.readouterr().out == "weather is registered with weight 0.5\n"


def test_refusal_is_the_agents_sentence_and_status_1(command, capsys):
    detail = "no environment is named 'wether'; did you mean 'weather'?"
    with json_service({"PATCH /environments/wether": (404, {"detail": detail})}) as agents:
        assert command(agents, "pause", "wether") == 1
    assert capsys.readouterr().err == f"headrace: {detail}\n"


def test_name_cannot_leave_its_place_in_the_path(command):
    with json_service({}) as agents:
        assert command(agents, "show", "../status") == 1
    assert agents.received == [("GET /environments/..%2Fstatus", None)]


def test_options_stand_before_or_after_the_action(run_file):
    with json_service({"GET /environments/weather": (200, WEATHER)}) as agents:
        before = ["--config", str(run_file), "--set", "env_agents.url=http://127.0.0.1:1", "show", "weather"]
        assert main(["environments", *before, "--set", f"env_agents.url={agents.url}"]) == 0


def test_missing_run_file_is_a_sentence(capsys):
    assert main(["environments", "pause", "weather"]) == 2
    assert capsys.readouterr().err == "headrace: headrace environments must know the run; give its run file with --config\n"


def test_missing_spec_file_is_a_sentence(command, capsys):
    with json_service({}) as agents:
        assert command(agents, "add", "no-such.yaml") == 2
    assert "cannot read no-such.yaml: No such file or directory" in capsys.readouterr().err
