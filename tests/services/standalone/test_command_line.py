import subprocess
import sys

import pytest

from services.standalone.command_line import main
from services.standalone.ports import free_ports

HEAVY = ("torch", "deepspeed", "transformers", "matplotlib", "fastapi", "rich", "httpx", "redis")


@pytest.fixture
def run_file(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    hub, agents = free_ports(2)
    path = tmp_path / "mine.yaml"
    path.write_text(
        f"run: {{id: x, directory: {tmp_path}/out, model_path: {model}}}\ntrainer: {{num_updates: 1}}\n"
        f"inference_hub: {{port: {hub}}}\nenv_agents: {{port: {agents}}}\n"
    )
    return path


@pytest.mark.parametrize("arguments", [["--help"], ["up", "--help"], ["status", "--help"], ["demo", "--help"]])
def test_help_has_examples_and_imports_nothing_heavy(arguments):
    code = (
        "import sys; from services.standalone.command_line import main\n"
        f"try: main({arguments!r})\n"
        f"finally: print('HEAVY', [name for name in {HEAVY!r} if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "examples:" in result.stdout
    assert "HEAVY []" in result.stdout


def test_run_file_that_cannot_be_used_is_one_sentence_and_status_2(capsys):
    assert main(["up", "--config", "no-such.yaml"]) == 2
    assert capsys.readouterr().err == ("headrace: cannot read no-such.yaml: No such file or directory; give an existing run file\n")


def test_unknown_key_names_the_closest(run_file, capsys):
    assert main(["up", "--config", str(run_file), "--set", "trainer.learning_rat=1"]) == 2
    assert "did you mean 'learning_rate'?" in capsys.readouterr().err


def test_model_path_that_is_missing_is_one_sentence(run_file, capsys):
    assert main(["up", "--config", str(run_file), "--set", "run.model_path=nowhere"]) == 2
    error = capsys.readouterr().err
    assert "run.model_path must be a directory with a Hugging Face model, got 'nowhere'" in error
    assert error.count("\n") == 1


def test_redis_that_does_not_answer_is_one_sentence(run_file, capsys):
    (port,) = free_ports(1)
    url = f"redis.url=redis://127.0.0.1:{port}/0"
    assert main(["up", "--config", str(run_file), "--external-redis", "--set", url]) == 2
    assert "redis.url must be a reachable Redis" in capsys.readouterr().err


def test_redis_named_by_the_environment_is_not_started_here(run_file, capsys, monkeypatch):
    (port,) = free_ports(1)
    monkeypatch.setenv("HEADRACE_REDIS_URL", f"redis://127.0.0.1:{port}/0")
    assert main(["up", "--config", str(run_file)]) == 2
    assert "redis.url must be a reachable Redis" in capsys.readouterr().err


def test_status_of_a_run_that_does_not_run_is_one_sentence(run_file, capsys):
    assert main(["status", "--config", str(run_file)]) == 1
    error = capsys.readouterr().err
    assert "the run must answer at http://127.0.0.1:" in error
    assert error.count("\n") == 1
