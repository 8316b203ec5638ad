import io
import json

import pytest
from rich.console import Console

from services.standalone.command_line import main
from services.standalone.doctor import examination
from services.standalone.doctor.finding import ok, problem, warning
from tests.services.standalone.services_at import json_service

REPORT = examination.Report(
    [
        ok("python", "3.11.7", "Python >= 3.11"),
        warning("docker", "not installed", "for containers", "install it"),
        problem("model", "no config.json in\nmodels/" + "x" * 200, "a model", "download it"),
    ],
    num_problems=1,
    num_warnings=1,
)


@pytest.fixture
def run_file(tmp_path, tiny_model, redis_url, keys):
    path = tmp_path / "mine.yaml"
    path.write_text(
        f"run: {{id: {keys.run_id}, directory: {tmp_path}/out, model_path: {tiny_model}}}\nredis: {{url: '{redis_url}'}}\n"
        "engines: {device: cpu}\ntrainer: {num_updates: 1, weight_push: {backend: gloo}}\nenv_agents: {renderer: qwen3}\n"
    )
    return path


def examined(run_file) -> dict[str, str]:
    findings = examination.examine(run_file, [], progress=lambda what: None)
    return {finding.check: str(finding.severity) for finding in findings}


def test_lines_off_a_terminal_begin_with_the_severity_and_are_not_wrapped():
    console = Console(file=io.StringIO(), width=60)
    console.soft_wrap = True
    console.print(examination.lines(REPORT))
    assert console.file.getvalue().splitlines() == [
        "ok       python: 3.11.7 (Python >= 3.11)",
        "warning  docker: not installed (for containers); install it",
        f"problem  model: no config.json in models/{'x' * 200} (a model); download it",
        "problems: 1, warnings: 1, ok: 1",
    ]


def test_terminal_gets_the_same_lines_with_the_severity_in_colour():
    text = examination.lines(REPORT)
    assert [text.plain[span.start : span.end].strip() for span in text.spans] == ["ok", "warning", "problem"]
    assert [span.style for span in text.spans] == ["green", "yellow", "bold red"]


def test_machine_alone_is_examined_without_a_run_file():
    found = examined(None)
    assert {"python", "torch", "sglang", "gpus", "cores", "disk", "clock", "docker"} <= set(found)
    assert not {"redis", "hub", "model"} & set(found)


def test_run_that_can_start_has_no_problem(run_file, monkeypatch):
    for variable in ("HEADRACE_HUB_URL", "HEADRACE_AGENTS_URL", "HEADRACE_REDIS_URL"):
        monkeypatch.delenv(variable, raising=False)
    found = examined(run_file)
    assert "problem" not in {found[check] for check in ("gpus", "model", "chat format", "run directory", "redis")}


def test_run_that_is_up_is_asked_for_its_engines(run_file, monkeypatch):
    engine_answers = {
        "GET /server_info": (200, {"version": "0.5.22", "dp_size": 1}),
        "GET /model_info": (200, {"weight_version": "7"}),
    }
    with json_service(engine_answers) as engine:
        hub_answers = {
            "GET /status": (200, {"version": 7, "engines": {"ready": 1}}),
            "GET /engines": (200, [{"url": engine.url, "state": "joining", "problem": "another version"}]),
        }
        with json_service(hub_answers) as hub:
            monkeypatch.setenv("HEADRACE_HUB_URL", hub.url)
            monkeypatch.setenv("HEADRACE_AGENTS_URL", "http://127.0.0.1:1")
            findings = examination.examine(run_file, [], progress=lambda what: None)
    by_check = {(one.check, one.found): str(one.severity) for one in findings}
    assert by_check[f"engine {engine.url}", "SGLang 0.5.22"] == "problem"
    assert by_check[f"engine {engine.url}", "joining: another version"] == "warning"
    (agents,) = [one for one in findings if one.check == "agents"]
    assert (agents.severity, "and the run is up" in agents.found) == ("problem", True)


def test_run_file_that_cannot_be_used_is_a_finding_beside_the_machines(tmp_path, capsys):
    path = tmp_path / "mine.yaml"
    path.write_text("run: {id: x}\n")
    assert main(["doctor", "--config", str(path), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["findings"][0]["check"], report["findings"][0]["severity"]) == ("run file", "problem")
    assert report["num_problems"] >= 1
    assert "python" in {finding["check"] for finding in report["findings"]}


def test_override_without_a_run_file_is_refused(capsys):
    assert main(["doctor", "--set", "run.id=x"]) == 2
    assert "--set must belong to a run file" in capsys.readouterr().err
