"""The agent process from the outside: command line, shutdown, and survival of Redis' and its own death."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgspec
import pytest

from shared.configuration import (
    Configuration,
    EnvAgentsSection,
    InferenceHubSection,
    RedisSection,
    RolloutSection,
    RunSection,
    TrainerSection,
)
from shared.environment_spec import EnvironmentSpec
from shared.ledger import TrainingLedger

pytestmark = pytest.mark.stack


def run_agents(arguments: list[str], **keywords) -> subprocess.Popen:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "services.env_agents", *arguments]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, **keywords)


@pytest.fixture
def slow_hub(tokenizer):
    """A hub that thinks until it is told to answer."""
    answering = threading.Event()
    ids = tokenizer.encode("0<|im_end|>", add_special_tokens=False)
    meta_info = {
        "output_token_logprobs": [[-1.0, token_id, None] for token_id in ids],
        "weight_versions": [{"version": "0", "start": 0, "end": len(ids)}],
        "finish_reason": {"type": "stop"},
    }

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            answering.wait(60)
            body = json.dumps({"meta_info": meta_info}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

        def handle(self):
            with suppress(ConnectionError):
                super().handle()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server, answering
    answering.set()
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def run_file(tmp_path, tokenizer, redis_url, keys, slow_hub):
    model = tmp_path / "model"
    tokenizer.save_pretrained(model)
    (model / "config.json").write_text("{}")
    configuration = Configuration(
        run=RunSection(keys.run_id, str(tmp_path / "run"), str(model)),
        rollout=RolloutSection(rollout_batch_size=2, num_return_sequences_in_group=2, async_generation_ratio=0),
        redis=RedisSection(redis_url),
        inference_hub=InferenceHubSection(port=slow_hub[0].server_address[1]),
        env_agents=EnvAgentsSection(
            port=0,
            renderer="qwen3",
            lease_s=1.0,
            environments=(EnvironmentSpec(name="chain", import_path="examples.lookup_chain:LookupChain"),),
        ),
        trainer=TrainerSection(num_updates=1),
    )
    path = tmp_path / "run.yaml"
    path.write_bytes(msgspec.yaml.encode(configuration))
    return path


@pytest.fixture
def ledger(redis_client, keys):
    return TrainingLedger(redis_client, keys)


@contextmanager
def agents(run_file: Path):
    process = run_agents(["--config", str(run_file)])
    drained = threading.Thread(target=process.stderr.read)
    drained.start()
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        drained.join()
        process.stderr.close()


def wait_until(predicate, *, description: str) -> None:
    deadline = time.monotonic() + 90
    while not predicate():
        assert time.monotonic() < deadline, f"waited in vain until {description}"
        time.sleep(0.05)


def test_groups_of_a_killed_process_are_adopted_by_another(run_file, ledger, slow_hub, redis_client, keys):
    with agents(run_file) as killed:
        wait_until(lambda: ledger.books().running == 2, description="both groups run")
        killed.send_signal(signal.SIGKILL)
        killed.wait()
    slow_hub[1].set()
    with agents(run_file):
        wait_until(lambda: ledger.books().ready == 2, description="both groups are complete")
    assert redis_client.xlen(keys.trajectories) == 4
    assert ledger.books().started == 2
    assert ledger.books().is_balanced


def test_terminated_process_exits_soon_and_leaves_its_groups(run_file, ledger, redis_client, keys):
    with agents(run_file) as process:
        wait_until(lambda: ledger.books().running == 2, description="both groups run")
        process.terminate()
        assert process.wait(timeout=10) == 0
    seconds, microseconds = redis_client.time()
    assert all(
        expiry <= 1000 * seconds + microseconds / 1000 for _, expiry in redis_client.zrange(keys.running, 0, -1, withscores=True)
    )


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("env_agents.lease=3", "unknown key 'env_agents.lease'; did you mean 'lease_s'?"),
        ("redis.url=redis://127.0.0.1:1/0", "redis.url must be a reachable Redis, got 'redis://127.0.0.1:1/0'"),
        ("env_agents.renderer=qwen", "env_agents.renderer 'qwen' cannot be used"),
        ("env_agents.import_allowlist=[mine]", "must be inside env_agents.import_allowlist (mine)"),
    ],
)
def test_unusable_configuration_is_one_sentence_and_code_2(run_file, override, sentence):
    with run_agents(["--config", str(run_file), "--set", override]) as process:
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert sentence in errors.splitlines()[-1]
    assert "Traceback" not in errors


def test_taken_port_is_one_sentence_and_code_2(run_file):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with run_agents(["--config", str(run_file), "--set", f"env_agents.port={port}"]) as process:
            _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert f"env_agents.port must be free, and 127.0.0.1:{port} is not" in errors


def test_help_is_there_without_heavy_imports():
    code = (
        "import sys, services.env_agents.__main__ as m; sys.exit(bool({'aiohttp', 'renderers', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    with run_agents(["--help"], stdout=subprocess.PIPE) as process:
        text, _ = process.communicate(timeout=30)
    assert "examples:" in text
