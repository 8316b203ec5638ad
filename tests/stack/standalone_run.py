"""`headrace up` as a user runs it: a process of its own, seen from outside."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import redis
import yaml

from benchmarks.stream_history import StreamHistory, read_stream_history
from services.standalone import run_files
from services.standalone.run_files import Lineage
from shared.configuration import Configuration, load
from shared.keys import Keys
from shared.ledger import Books, TrainingLedger

DEADLINE_S = 240.0
POLL_S = 0.05


class StandaloneRun:
    """One run directory, and the `headrace up` that works in it. `stop` leaves no process behind."""

    def __init__(self, folder: Path, model: Path, *, num_updates: int, checkpoint_every: int, max_restarts: int = 3) -> None:
        self.directory = folder / "run"
        self._run_file = folder / "mine.yaml"
        raw = run_file(self.directory, model, num_updates, checkpoint_every) | {"up": {"max_restarts": max_restarts}}
        self._run_file.write_text(yaml.safe_dump(raw))
        self._output = folder / "output.txt"
        self._process: subprocess.Popen[bytes] | None = None
        self._family: set[psutil.Process] = set()

    @property
    def output(self) -> str:
        return self._output.read_text()

    @property
    def configuration(self) -> Configuration:
        """As `headrace up` resolved it."""
        return load(self.directory / "run.yaml", environment_variables={})

    @property
    def lineage(self) -> list[Lineage]:
        return run_files.lineage(self.directory)

    def start(self) -> None:
        command = [sys.executable, "-m", "services.standalone.command_line", "up", "--config", str(self._run_file)]
        with self._output.open("ab") as output:
            self._process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"}
            )
        self._family.clear()

    def wait_until(self, predicate: Callable[[], bool], *, description: str) -> None:
        """Polls while the run goes on. Fails when it ends first or the deadline passes."""
        deadline = time.monotonic() + DEADLINE_S
        while not predicate():
            assert self.is_running(), f"the run ended before {description}:\n{self.output[-5000:]}"
            assert time.monotonic() < deadline, f"waited {DEADLINE_S:g} s for {description}:\n{self.output[-5000:]}"
            time.sleep(POLL_S)

    def is_running(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            return False
        self._family.update(psutil.Process(self._process.pid).children(recursive=True))
        return True

    def wait(self) -> int:
        """The exit status."""
        assert self._process is not None
        deadline = time.monotonic() + DEADLINE_S
        while self.is_running():
            assert time.monotonic() < deadline, f"the run did not end:\n{self.output[-5000:]}"
            time.sleep(POLL_S)
        return self._process.returncode

    def kill_trainer(self) -> None:
        """SIGKILL to rank 0, the process that trains."""
        words_by_process = {process: words for process in self._family if (words := _command_line(process))}
        for process, words in words_by_process.items():
            if "--config" in words and any(word.endswith("trainer/train.py") for word in words[1:3]):
                process.send_signal(signal.SIGKILL)
                return
        raise AssertionError(f"no rank among {list(words_by_process.values())}")

    def left_processes(self) -> list[psutil.Process]:
        """Of all that were ever seen below `headrace up`, those that still run."""
        _, alive = psutil.wait_procs(self._family, timeout=10)
        return [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]

    def stop(self) -> None:
        """Ends whatever a failed test left."""
        if self._process and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(timeout=DEADLINE_S)
        for process in self.left_processes():
            process.kill()

    def books(self) -> Books | None:
        """The ledger at this instant, None while Redis is not there."""
        try:
            with redis.Redis.from_url(self.configuration.redis.url, socket_timeout=5) as client:
                return TrainingLedger(client, Keys(self.configuration.run.id)).books()
        except redis.RedisError:
            return None

    def stream_history(self) -> StreamHistory:
        return read_stream_history(self.directory / "redis", Keys(self.configuration.run.id))


def run_file(directory: Path, model: Path, num_updates: int, checkpoint_every: int) -> dict[str, Any]:
    guessing = {
        "name": "guessing",
        "import_path": "tests.stack.guessing:Guessing",
        "evaluation_tasks": {"kind": "seeds", "start": 1_000_000, "count": 8},
        "sampling": {"max_new_tokens": 256},
        "limits": {"max_turns": 4, "max_tokens": 1024},
    }
    return {
        "run": {"id": "stack-test", "directory": str(directory), "model_path": str(model)},
        "rollout": {"rollout_batch_size": 2, "num_return_sequences_in_group": 4, "async_generation_ratio": 1},
        "redis": {"url": "redis://127.0.0.1:0/0"},
        "engines": {"count": 1, "device": "cpu", "dtype": "float32", "max_total_tokens": 20_000, "mem_fraction_static": 0.2},
        "inference_hub": {"port": 0},
        "env_agents": {"port": 0, "renderer": "qwen3", "import_allowlist": ["tests.stack"], "environments": [guessing]},
        "trainer": {
            "num_updates": num_updates,
            "learning_rate": 1e-3,
            "dtype": "float32",
            "weight_push": {"backend": "gloo", "bucket_mib": 16},
            "checkpoint": {"every_updates": checkpoint_every},
            "evaluation": {"every_updates": num_updates, "num_episodes": 4},
        },
    }


def _command_line(process: psutil.Process) -> list[str]:
    """Empty for a process that has ended, as short-lived ones of the family have."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []
