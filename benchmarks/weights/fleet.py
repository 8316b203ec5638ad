"""A Redis, engines and a hub as processes that can be killed and started again."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.waiting import wait_until

START_TIMEOUT_S = 400.0


@dataclass
class Fleet:
    hub_url: str
    engine_urls: list[str]
    engines: list[subprocess.Popen[bytes]]
    model_path: Path
    restart_hub: Callable[[], None]
    restart_engine: Callable[[], None]
    """The last one, which was killed; returns when it is ready or wants weights."""

    @property
    def victim(self) -> subprocess.Popen[bytes]:
        return self.engines[-1]


@contextmanager
def started(model_path: Path, folder: Path, *, num_engines: int, timeout_s: float) -> Iterator[Fleet]:
    """A Redis, engines that are ready, and a hub that knows them. `timeout_s` is the deadline of each step of an update."""
    from benchmarks.redis_server import redis_command
    from services.standalone.ports import free_ports

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

        start(*redis_command(socket, append_only=True))
        wait_until(socket.exists, "Redis listens", timeout_s=START_TIMEOUT_S)

        def start_engine(port: int) -> subprocess.Popen[bytes]:
            return start(sys.executable, "-m", "services.engine", *config, "--port", str(port))

        engines = [start_engine(port) for port in engine_ports]
        hub = start_hub()

        def restart_hub() -> None:
            nonlocal hub
            end(hub)
            hub = start_hub()

        def restart_engine() -> None:
            engines[-1] = start_engine(engine_ports[-1])
            wait_until(lambda: num_live(hub_url) == num_engines, "the engine is back", timeout_s=START_TIMEOUT_S)

        wait_until(lambda: num_ready(hub_url) == num_engines, "every engine is ready", timeout_s=START_TIMEOUT_S)
        yield Fleet(hub_url, urls, engines, model_path, restart_hub, restart_engine)


def end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def num_ready(hub_url: str) -> int:
    return sum(state == "ready" for state in _states(hub_url))


def num_live(hub_url: str) -> int:
    """Engines that are ready or want weights."""
    return sum(state in ("ready", "syncing") for state in _states(hub_url))


def _states(hub_url: str) -> list[str]:
    try:
        return [engine["state"] for engine in httpx.get(f"{hub_url}/engines", timeout=5, trust_env=False).json()]
    except httpx.TransportError:
        return []
