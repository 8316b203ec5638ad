import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "services.inference_hub"]


@pytest.fixture
def run_file(tmp_path: Path, redis_url: str, keys) -> Path:
    (tmp_path / "config.json").write_text("{}")
    content = {
        "run": {"id": keys.run_id, "directory": str(tmp_path), "model_path": str(tmp_path)},
        "redis": {"url": redis_url},
        "trainer": {"num_updates": 1},
    }
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(content))
    return path


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables}
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=60, check=False, env=environment)


def test_help_shows_examples_without_loading_the_server():
    result = run("--help")
    assert result.returncode == 0
    assert "--set inference_hub.port=8900" in result.stdout


def test_a_taken_port_is_one_sentence(run_file: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run("--config", str(run_file), "--set", f"inference_hub.port={port}")
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert f"inference_hub.port must be free on 127.0.0.1, got {port}" in result.stderr


def test_an_unreachable_redis_is_one_sentence(run_file: Path):
    result = run("--config", str(run_file), "--set", "inference_hub.port=0", "--set", "redis.url=redis://127.0.0.1:1/0")
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "redis.url must be a reachable Redis" in result.stderr


def test_a_redis_that_refuses_the_password_is_one_sentence_without_it(run_file: Path, serve_redis):
    url = serve_redis("--requirepass", "s3cret", password="s3cret")
    overrides = ("--set", f"redis.url={url}", "--set", "inference_hub.port=0")
    result = run("--config", str(run_file), *overrides, HEADRACE_REDIS_PASSWORD="wr0ng")
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert f"Redis at {url} must accept the password it is given, and refuses" in result.stderr
    assert "wr0ng" not in result.stderr


def test_the_process_serves_until_it_is_told_to_stop(run_file: Path, unused_tcp_port: int):
    arguments = ["--config", str(run_file), "--set", f"inference_hub.port={unused_tcp_port}"]
    with subprocess.Popen([*COMMAND, *arguments], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert any("serving on" in line for line in process.stderr)
        with urllib.request.urlopen(f"http://127.0.0.1:{unused_tcp_port}/health", timeout=30) as response:
            assert response.status == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0
