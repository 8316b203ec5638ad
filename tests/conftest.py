"""Fixtures that several folders of tests share: a real Redis with a fresh run in it, a tiny model, a real SGLang engine."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import hypothesis
import pytest
import redis

from benchmarks.timeline import Timeline
from services.standalone.ports import free_ports
from services.standalone.redis_server import redis_executable, write_access
from shared.keys import Keys

ENGINE_START_TIMEOUT_S = 180.0

hypothesis.settings.register_profile("shared-machine", deadline=None)
hypothesis.settings.load_profile("shared-machine")


@pytest.fixture(autouse=True)
def environment_variables_last_for_one_test() -> Iterator[None]:
    """Accelerate says there that this process is a rank, and processes that later tests start would believe it."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session")
def serve_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., str]]:
    """Starts a Redis on a Unix socket of its own with the arguments given; the answer is its address, without the password."""
    with ExitStack() as servers:

        def serve(*arguments: str, password: str | None = None) -> str:
            return servers.enter_context(_redis_server(tmp_path_factory.mktemp("redis"), arguments, password))

        yield serve


@contextmanager
def _redis_server(folder: Path, arguments: Sequence[str], password: str | None) -> Iterator[str]:
    socket = folder / "redis.sock"
    command = [redis_executable(), "--port", "0", "--unixsocket", str(socket), "--dir", str(folder), "--save", "", *arguments]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        url = f"unix://{socket}"
        patiently = redis.retry.Retry(redis.backoff.ConstantBackoff(0.05), 200)
        with redis.Redis.from_url(url, password=password, retry=patiently) as client:
            client.ping()
        yield url
        process.terminate()


@pytest.fixture(scope="session")
def redis_url(serve_redis: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Redis of this test session's own, as a run needs it, which lets its clients do what a run needs.

    Its user `narrow` may use no channels, and `operator` do everything.
    """
    access = write_access(tmp_path_factory.mktemp("access"), None)
    with access.open("a") as file:
        file.write("user narrow on nopass ~headrace:* resetchannels +@all -@dangerous +info\nuser operator on nopass ~* &* +@all\n")
    return serve_redis("--appendonly", "yes", "--appendfsync", "no", "--include", str(access))


@pytest.fixture(scope="session")
def one_rank() -> Iterator[None]:
    """This process as the only rank of a trainer."""
    import torch  # Here, because most tests do without.

    from trainer.model import start_ranks

    start_ranks(timeout=timedelta(seconds=60))
    yield
    torch.distributed.destroy_process_group()
    del os.environ["LOCAL_RANK"]


@pytest.fixture
def timeline(tmp_path: Path) -> Iterator[Timeline]:
    """What a test of faults writes down: left in its folder, and where pytest shows it if the test fails."""
    timeline = Timeline()
    yield timeline
    timeline.write(tmp_path / "timeline.txt")
    sys.stdout.write(str(timeline))


@pytest.fixture
def keys(redis_url: str) -> Iterator[Keys]:
    """The keys of a run that exists for one test."""
    keys = Keys(f"test-{os.getpid()}-{uuid.uuid4().hex[:8]}")
    yield keys
    with redis.Redis.from_url(redis_url) as client:
        for key in client.scan_iter(f"*{{{keys.run_id}}}*"):
            client.delete(key)


@pytest.fixture
def redis_client(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as client:
        yield client


@pytest.fixture(scope="session")
def repository() -> Path:
    return Path(__file__).parents[1]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny policy before its warm start: random weights, with its tokenizer, in a Hugging Face directory."""
    from examples.tiny_policy.demonstrations import tokenizer_for
    from examples.tiny_policy.model import new_policy
    from examples.tiny_policy.tasks import Side, questions

    directory = tmp_path_factory.mktemp("tiny_model")
    tokenizer = tokenizer_for(questions(Side.TRAIN, seed=0))
    tokenizer.save_pretrained(directory)
    new_policy(tokenizer, seed=0).save_pretrained(directory)
    return directory


@dataclass(frozen=True)
class EngineProcess:
    url: str
    pid: int
    """Of its HTTP process, which leads a group of its own."""


@pytest.fixture(scope="session")
def engine_process(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """A real SGLang engine on the CPU that serves `tiny_model`, started once for the session."""
    folder = tmp_path_factory.mktemp("engine")
    run_file = folder / "run.yaml"
    run_file.write_text(
        f"""
run: {{id: engine-test, directory: {folder}, model_path: {tiny_model}}}
engines: {{device: cpu, dtype: float32, max_total_tokens: 20000, mem_fraction_static: 0.2}}
trainer: {{num_updates: 1}}
"""
    )
    [port] = free_ports(1)
    command = [sys.executable, "-m", "services.engine", "--config", str(run_file), "--port", str(port)]
    url = f"http://127.0.0.1:{port}"
    with (folder / "engine.log").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True
        )
        try:
            _wait_until_ready(process, url, folder / "engine.log")
            yield EngineProcess(url, process.pid)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture(scope="session")
def engine_url(engine_process: EngineProcess) -> str:
    return engine_process.url


@pytest.fixture
def initial_engine_url(engine_url: str, tiny_model: Path) -> str:
    """The session's engine with `tiny_model`'s weights as version 0, whatever the tests before this one pushed."""
    body = json.dumps({"model_path": str(tiny_model), "weight_version": "0", "flush_cache": True}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{engine_url}/update_weights_from_disk", data=body, headers=headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        assert json.load(response)["success"]
    return engine_url


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + ENGINE_START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=5):
                return
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            time.sleep(0.25)
    pytest.fail(f"the engine did not get ready; its last lines:\n{log.read_text()[-3000:]}")
