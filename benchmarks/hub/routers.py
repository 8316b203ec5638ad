"""The processes of the benchmark, each on its core: routers, the Redis of the hub, and canned engines."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.redis_server import redis_command
from benchmarks.waiting import wait_until
from services.standalone.ports import free_ports

START_TIMEOUT_S = 90.0
ENGINE_START_TIMEOUT_S = 480.0
OPEN_FILES = 65_536
ROUTERS = ("hub", "smg", "sglang-router")
PEER_LAUNCH = {
    "smg": [sys.executable, "-c", "from smg.cli import main; main()", "launch"],
    "sglang-router": [sys.executable, "-m", "sglang_router.launch_router"],
}


@dataclass(frozen=True)
class Router:
    """A router that runs, in a process of its own."""

    name: str
    port: int
    process: psutil.Process

    @property
    def cpu_s(self) -> float:
        """CPU seconds of all its threads and children so far."""
        times = self.process.cpu_times()
        return sum(times[:2]) + sum(sum(child.cpu_times()[:2]) for child in self.process.children(recursive=True))

    @property
    def resident_mb(self) -> float:
        processes = [self.process, *self.process.children(recursive=True)]
        return sum(process.memory_info().rss for process in processes) / 2**20


def leave_a_core_to_routers() -> set[int]:
    """This process and what it starts leave one core, which is returned. Raises: SystemExit on a machine of one core."""
    available = sorted(os.sched_getaffinity(0))
    if len(available) < 2:
        raise SystemExit("the benchmark needs at least two cores: one for the router, one for engine and caller; got one")
    os.sched_setaffinity(0, set(available[1:]))
    return {available[0]}


def raise_open_files() -> None:
    """As many sockets as 10,000 open calls need, where the system allows it."""
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(hard, OPEN_FILES), max(hard, OPEN_FILES)))
    except (ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class Processes:
    """Starts processes on given cores, and ends them with the stack they were made on."""

    def __init__(self, stack: ExitStack, folder: Path, router_cores: set[int]) -> None:
        self._stack = stack
        self._folder = folder
        self._router_cores = router_cores
        self._other_cores = os.sched_getaffinity(0)

    def engine(self, *arguments: str) -> int:
        """The port of a canned engine."""
        (port,) = free_ports(1)
        self._start(
            "engine", [sys.executable, "-m", "benchmarks.hub.canned_engine", "--port", str(port), *arguments], self._other_cores
        )
        wait_until(lambda: accepts(port), f"an engine listens on port {port}", timeout_s=START_TIMEOUT_S)
        return port

    def real_engines(self, number: int) -> list[tuple[int, subprocess.Popen[bytes]]]:
        """Ports and processes of SGLang engines on the CPU, which serve one small model. On all cores: a hub in front of them has
        little to do. One after the other, because a start takes all of a core."""
        from benchmarks.hub.kill import new_model

        new_model(self._folder)
        run_file = self._folder / "engines.yaml"
        run = {"id": "bench-hub", "directory": str(self._folder), "model_path": str(self._folder)}
        engines = {"device": "cpu", "dtype": "float32", "max_total_tokens": 40_000, "mem_fraction_static": 0.2}
        run_file.write_text(json.dumps({"run": run, "engines": engines, "trainer": {"num_updates": 1}}))
        all_cores = self._other_cores | self._router_cores
        started = []
        for port in free_ports(number):
            command = [sys.executable, "-m", "services.engine", "--config", str(run_file), "--port", str(port)]
            process = self._start("engine", command, all_cores, environment={"OMP_NUM_THREADS": "1"})
            what = f"the engine on port {port} answers"
            wait_until(lambda port=port: answers(port), what, timeout_s=ENGINE_START_TIMEOUT_S, process=process)
            started.append((port, process))
        return started

    def simulated_engines(self, number: int, *, speed: float) -> list[int]:
        """The ports of engines that take virtual time, all in one process."""
        ports = list(free_ports(number))
        command = [sys.executable, "-m", "benchmarks.hub.simulated_engine", "--speed", str(speed)]
        self._start("engine", [*command, "--ports", ",".join(map(str, ports))], self._other_cores)
        wait_until(lambda: all(accepts(port) for port in ports), "the simulated engines listen", timeout_s=START_TIMEOUT_S)
        return ports

    def router(
        self, name: str, engine_ports: list[int], *, policy: str = "round_robin", settings: dict[str, object] | None = None
    ) -> Router:
        """A router in front of the engines, which answers. `settings` are the hub's own."""
        urls = [f"http://127.0.0.1:{port}" for port in engine_ports]
        (port,) = free_ports(1)
        if name == "hub":
            command = [sys.executable, "-m", "services.inference_hub", "--config", str(self._run_file(port, urls, settings or {}))]
        else:
            (metrics_port,) = free_ports(1)
            command = [*PEER_LAUNCH[name], "--host", "127.0.0.1", "--port", str(port), "--worker-urls", *urls, "--policy", policy]
            command += ["--prometheus-port", str(metrics_port), "--max-concurrent-requests", "65536", "--log-level", "error"]
            command += ["--request-timeout-secs", "3600"]
        process = self._start(name, command, self._router_cores)
        wait_until(lambda: answers(port), f"{name} answers", timeout_s=START_TIMEOUT_S)
        return Router(name, port, psutil.Process(process.pid))

    def _run_file(self, port: int, urls: list[str], settings: dict[str, object]) -> Path:
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        (folder / "config.json").write_text("{}")
        socket = folder / "redis.sock"
        self._start("redis", redis_command(socket, append_only=True), self._other_cores)
        wait_until(socket.exists, "Redis listens", timeout_s=START_TIMEOUT_S)
        run_file = folder / "run.yaml"
        content = {
            "run": {"id": "bench-hub", "directory": str(folder), "model_path": str(folder)},
            "redis": {"url": f"unix://{socket}"},
            "engines": {"urls": urls},
            "inference_hub": {"port": port, **settings},
            "trainer": {"num_updates": 1},
        }
        run_file.write_text(json.dumps(content))
        return run_file

    def _start(
        self, name: str, command: list[str], on_cores: set[int], *, environment: dict[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        log = self._stack.enter_context((self._folder / f"{name}.log").open("ab"))
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            env={**os.environ, **(environment or {})},
            preexec_fn=lambda: os.sched_setaffinity(0, on_cores),
        )
        self._stack.callback(end, process)
        return process


@contextmanager
def processes(router_cores: set[int]) -> Iterator[Processes]:
    """Processes that end, and files that vanish, with the block."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        yield Processes(stack, Path(folder), router_cores)


def end(process: subprocess.Popen[bytes]) -> None:
    children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for child in children:
        if child.is_running():
            child.kill()


def kill(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to a process and all that it started."""
    for child in psutil.Process(process.pid).children(recursive=True):
        child.kill()
    process.kill()


def accepts(port: int) -> bool:
    import socket

    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


def answers(port: int) -> bool:
    """Whether a generate call goes through. The first one of a real engine takes a while."""
    import httpx

    body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}, "return_logprob": True}
    try:
        return httpx.post(f"http://127.0.0.1:{port}/generate", json=body, timeout=60, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False
