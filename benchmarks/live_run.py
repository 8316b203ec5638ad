"""A whole run under `headrace up`, as a user starts it, and its processes by name: what is killed, stopped and looked at."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from shared.configuration import Configuration, load
from shared.ledger import Books

RUN_FILE = Path(__file__).parents[1] / "examples" / "demo.yaml"
NUM_UPDATES = 1_000_000
"""More than anybody waits for: whoever started the run ends it."""
STOP_TIMEOUT_S = 120.0
START_TIMEOUT_S = 300.0
POLL_S = 0.05
MODULES = {
    "services.inference_hub": "hub",
    "services.env_agents": "agents",
    "services.engine": "engine",
    "sglang.launch_server": "engine",  # What the one above replaces itself with.
    "trainer.launch": "trainer",
}

LineSink = Callable[[str, str], None]
"""Gets a process's name, `headrace` for the supervisor, and one line that it printed."""


def make_policy(directory: Path) -> Path:
    """The demo's policy and tasks, unless they are there already."""
    if not (directory / "recipe.json").is_file():
        command = [sys.executable, "-m", "examples.tiny_policy", "--output", str(directory)]
        subprocess.run(command, check=True, stdout=sys.stderr)
    return directory


def run_file(directory: Path, policy: Path, *, seed: int, lease_s: float) -> dict[str, Any]:
    """Two engines, two agent processes and small batches, so that there is always something under way to be interrupted."""
    raw: dict[str, Any] = yaml.safe_load(RUN_FILE.read_text())
    raw["run"] = {"id": directory.name, "directory": str(directory), "model_path": str(policy), "seed": seed}
    raw["rollout"] = {
        "rollout_batch_size": 8,
        "num_return_sequences_in_group": 4,
        "async_generation_ratio": 1,
        # The tiny policy's updates are large, and a run that falls back to synchronous is under less load.
        "kl_fallback_threshold": None,
    }
    raw["redis"] = {"url": "redis://127.0.0.1:0/0"}
    raw["engines"] |= {"count": 2}
    raw["inference_hub"] = {"port": 0}
    raw["up"] = {"agent_processes": 2, "max_restarts": 1000}
    agents = raw["env_agents"]
    agents |= {"port": 0, "lease_s": lease_s, "import_allowlist": ["benchmarks.asynchrony"]}
    agents["environments"][0] |= {
        "import_path": "benchmarks.asynchrony.waiting_calculator:WaitingCalculator",
        "arguments": {"median_s": 0.2, "sigma": 0.5, "seed": seed},
        "tasks": {"kind": "parquet", "path": str(policy / "train.parquet")},
    }
    del agents["environments"][0]["evaluation_tasks"]
    trainer = raw["trainer"]
    del trainer["evaluation"]
    trainer |= {"num_updates": NUM_UPDATES, "checkpoint": {"every_updates": 3}}
    return raw


class LiveRun:
    """NEW → started → stopped. A thread hands on what the processes print; `stop` leaves no process behind."""

    def __init__(self, folder: Path, raw: dict[str, Any], sink: LineSink) -> None:
        self.directory = Path(raw["run"]["directory"])
        self._run_file = folder / f"{self.directory.name}.yaml"
        self._run_file.write_text(yaml.safe_dump(raw))
        self._output = folder / f"{self.directory.name}.txt"
        self._sink = sink
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None

    @property
    def configuration(self) -> Configuration:
        """As `headrace up` resolved it."""
        return load(self.directory / "run.yaml", environment_variables={})

    @property
    def parts(self) -> dict[str, psutil.Process]:
        """The processes that run now, by the names that `headrace up` gives them."""
        assert self._process is not None
        found = {}
        configuration = self.configuration
        for child in psutil.Process(self._process.pid).children():
            try:
                name = _name(child.cmdline(), configuration)
            except psutil.NoSuchProcess:
                continue
            if name is not None:
                found[name] = child
        return found

    def start(self) -> None:
        command = [sys.executable, "-m", "services.standalone.command_line", "up", "--config", str(self._run_file)]
        # Without addresses, passwords and tokens of another run.
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
        environment = {**inherited, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def wait_until(self, predicate: Callable[[], object], what: str, *, timeout_s: float = START_TIMEOUT_S) -> None:
        """Raises: RuntimeError if the run ends before, TimeoutError if it takes too long."""
        deadline = time.monotonic() + timeout_s
        while not predicate():
            if not self.is_running():
                raise RuntimeError(f"the run ended before {what}; see {self._output}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"within {timeout_s:g} s it should be that {what}; see {self._output}")
            time.sleep(POLL_S)

    def settle(self, books: Callable[[], Books], *, timeout_s: float) -> bool:
        """Starts no more episodes; returns when no group runs and no batch is left to train, or False when that takes too long."""
        batch_groups = self.configuration.rollout.rollout_batch_size
        self._set_paused(is_paused=True)

        def is_at_rest() -> bool:
            now = books()
            return now.running == 0 and now.ready < batch_groups

        try:
            self.wait_until(is_at_rest, "nothing runs", timeout_s=timeout_s)
        except TimeoutError:
            return False
        return True

    def resume(self) -> None:
        """Lets episodes begin again after `settle`."""
        self._set_paused(is_paused=False)

    def pause(self, seconds: float) -> None:
        """Raises: RuntimeError if the run ends before."""
        until = time.monotonic() + seconds
        self.wait_until(lambda: time.monotonic() >= until, f"{seconds:g} s have passed", timeout_s=seconds + START_TIMEOUT_S)

    def _set_paused(self, *, is_paused: bool) -> None:
        configuration = self.configuration
        [environment] = configuration.env_agents.environments
        url = f"{configuration.env_agents.address}/environments/{environment.name}"
        httpx.patch(url, json={"is_paused": is_paused}, timeout=30, trust_env=False).raise_for_status()

    def stop(self) -> int:
        """Ends the run as Ctrl-C does; the exit status of `headrace up`."""
        assert self._process is not None
        if self._process.poll() is None:
            family = psutil.Process(self._process.pid).children(recursive=True)
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            for left in psutil.wait_procs(family, timeout=10)[1]:
                left.kill()
        if self._reader:
            self._reader.join()
        return self._process.returncode

    def _read(self) -> None:
        """`headrace up` prints `name     │ line`."""
        assert self._process is not None
        assert self._process.stdout is not None
        with self._output.open("ab") as output, self._process.stdout as lines:
            for line in lines:
                output.write(b"%.2f " % time.time() + line)
                output.flush()
                name, bar, text = line.decode(errors="replace").rstrip("\n").partition("│ ")
                if bar:
                    self._sink(name.strip(), text)


def send(process: psutil.Process, number: int) -> None:
    """A signal to a part and to every process that it has started, as to a container or a machine."""
    os.killpg(process.pid, number)


def _name(words: list[str], configuration: Configuration) -> str | None:
    """None for a child that is none of the run's parts, such as one that has not become its program yet."""
    if words and Path(words[0]).name.startswith(("redis-server", "valkey-server")):
        return "redis"
    if "-m" not in words:
        return None
    name = MODULES.get(words[words.index("-m") + 1])
    if name == "engine":
        port = words[words.index("--port") + 1]
        [index] = [index for index, url in enumerate(configuration.engines.urls) if url.endswith(f":{port}")]
        return f"engine-{index}"
    if name == "agents" and any(word.startswith("env_agents.port=") for word in words):
        return "agents-1"
    return name
