"""Engines and a hub as processes, and the load that agents make."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

START_TIMEOUT_S = 400.0
OUTPUT_TOKENS = 4
"""Short calls, so that tokens are counted soon after they were sampled."""


@dataclass
class Fleet:
    hub_url: str
    engine_urls: list[str]
    engines: list[subprocess.Popen[bytes]]
    model_path: Path
    restart_hub: Callable[[], None]


@contextmanager
def started(model_path: Path, folder: Path, *, num_engines: int, timeout_s: float) -> Iterator[Fleet]:
    """A Redis, engines that are ready, and a hub that knows them. `timeout_s` is the deadline of each step of an update."""
    from services.standalone.ports import free_ports
    from services.standalone.redis_server import redis_executable

    *engine_ports, hub_port = free_ports(num_engines + 1)
    urls = [f"http://127.0.0.1:{port}" for port in engine_ports]
    socket, run_file = folder / "redis.sock", folder / "run.yaml"
    run = {
        "run": {"id": "bench-weights", "directory": str(folder), "model_path": str(model_path)},
        "redis": {"url": f"unix://{socket}"},
        "engines": {"urls": urls, "device": "cpu", "dtype": "float32", "max_total_tokens": 20000, "mem_fraction_static": 0.2},
        "inference_hub": {"port": hub_port, "weight_update_timeout_s": timeout_s, "probe_interval_s": 0.5},
        "trainer": {"num_updates": 1},
    }
    run_file.write_text(json.dumps(run))
    redis_command = [redis_executable(), "--port", "0", "--unixsocket", str(socket), "--dir", str(folder), "--save", ""]
    config = ["--config", str(run_file)]
    hub_url = f"http://127.0.0.1:{hub_port}"
    with ExitStack() as stack, (folder / "processes.log").open("ab") as log:

        def start(*command: str) -> subprocess.Popen[bytes]:
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
            stack.callback(end, process)
            return process

        def start_hub() -> subprocess.Popen[bytes]:
            return start(sys.executable, "-m", "services.inference_hub", *config)

        start(*redis_command, "--appendonly", "yes")
        wait_until(socket.exists, "Redis listens")
        engines = [start(sys.executable, "-m", "services.engine", *config, "--port", str(port)) for port in engine_ports]
        hub = start_hub()

        def restart_hub() -> None:
            nonlocal hub
            end(hub)
            hub = start_hub()

        wait_until(lambda: num_ready(hub_url) == num_engines, "every engine is ready")
        yield Fleet(hub_url, urls, engines, model_path, restart_hub)


def end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def num_ready(hub_url: str) -> int:
    try:
        return int(httpx.get(f"{hub_url}/weights", timeout=5, trust_env=False).json()["ready_engines"])
    except (httpx.TransportError, KeyError):
        return 0


def wait_until(is_true: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not is_true():
        if time.monotonic() > deadline:
            raise TimeoutError(f"within {START_TIMEOUT_S:g} s it should be that {what}")
        time.sleep(0.2)


@dataclass
class Load:
    """Calls through the hub that never stop. `finished` are (time, tokens, retractions) of each."""

    hub_url: str
    num_callers: int
    finished: list[tuple[float, int, int]] = field(default_factory=list)
    num_failed: int = 0
    _is_over: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def running(self) -> Iterator["Load"]:
        callers = [threading.Thread(target=self._call, args=(index,)) for index in range(self.num_callers)]
        for caller in callers:
            caller.start()
        try:
            yield self
        finally:
            self._is_over.set()
            for caller in callers:
                caller.join()

    def tokens_between(self, start: float, end: float) -> int:
        return sum(tokens for finished_at, tokens, _ in self.finished if start <= finished_at < end)

    @property
    def num_recomputed(self) -> int:
        return sum(retractions > 0 for *_, retractions in self.finished)

    def _call(self, index: int) -> None:
        sampling = {"max_new_tokens": OUTPUT_TOKENS, "temperature": 1.0, "ignore_eos": True}
        body = {"input_ids": [index + 5, *range(10, 40)], "sampling_params": sampling}
        with httpx.Client(trust_env=False, timeout=300, transport=httpx.HTTPTransport(retries=20)) as client:
            while not self._is_over.is_set():
                try:
                    response = client.post(f"{self.hub_url}/generate", json=body)
                    meta_info = response.raise_for_status().json()["meta_info"]
                except (httpx.RemoteProtocolError, httpx.ReadError, httpx.ConnectError):
                    # The hub was killed; agents ask its successor again.
                    time.sleep(0.1)
                    continue
                except httpx.HTTPStatusError:
                    self.num_failed += 1
                    continue
                retractions = int(meta_info.get("num_retractions") or 0)
                self.finished.append((time.perf_counter(), int(meta_info["completion_tokens"]), retractions))
