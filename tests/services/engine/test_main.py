import subprocess
import sys

import pytest


def run(repository, *arguments):
    command = [sys.executable, "-m", "services.engine", *arguments]
    return subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=60)


def test_help_has_examples(repository):
    finished = run(repository, "--help")
    assert finished.returncode == 0
    assert "python -m services.engine --config run.yaml --port 30000" in finished.stdout


@pytest.mark.parametrize(
    ("engines", "sentence"),
    [
        ("{dtypes: float32}", "did you mean 'dtype'?"),
        ("{device: tpu}", "engines.device"),
    ],
)
def test_unusable_run_file_is_one_sentence_and_status_2(repository, tmp_path, engines, sentence):
    run_file = tmp_path / "run.yaml"
    run_file.write_text(
        f"run: {{id: a, directory: {tmp_path}, model_path: {tmp_path}}}\nengines: {engines}\ntrainer: {{num_updates: 1}}\n"
    )
    finished = run(repository, "--config", str(run_file), "--port", "1")
    assert finished.returncode == 2
    assert sentence in finished.stderr
    assert finished.stderr.count("\n") == 1
