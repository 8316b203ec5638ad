"""Cores, memory, disk, compiler, clock and Docker of this machine."""

import os
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from services.standalone.doctor.finding import Finding, ok, problem, warning
from services.standalone.doctor.programs import ask

GIB: Final = 2**30
MIN_CORES: Final = 2
MIN_MEMORY_GIB: Final = 4
MIN_DISK_GIB: Final = 5
MIN_SHARED_MEMORY_GIB: Final = 1
"""Docker gives a container 64 MiB; NCCL and the workers of torch exchange their buffers there."""
EARLIEST_TIME_S: Final = 1_735_689_600
"""The first of January 2025, before the first version of Headrace."""
DOCKER_TIMEOUT_S: Final = 15.0
SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - the mount, not a file in it


@dataclass(frozen=True)
class Machine:
    """Bytes are those that are free now; None where this system does not tell."""

    num_cores: int
    memory_bytes: int | None
    disk_bytes: int
    disk: str
    shared_memory_bytes: int | None
    compiler: str | None
    time_s: float


@dataclass(frozen=True)
class Docker:
    """`engine` and `compose` are versions, `problem` why there is no engine."""

    has_client: bool
    engine: str | None = None
    compose: str | None = None
    problem: str = ""


def look(directory: Path) -> Machine:
    """`directory` is on the disk that the run writes to."""
    return Machine(
        num_cores=len(os.sched_getaffinity(0)),
        memory_bytes=_available_memory(),
        disk_bytes=shutil.disk_usage(directory).free,
        disk=str(directory),
        shared_memory_bytes=shutil.disk_usage(SHARED_MEMORY).total if SHARED_MEMORY.is_dir() else None,
        compiler=next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None),
        time_s=time.time(),
    )


def look_at_docker() -> Docker:
    if shutil.which("docker") is None:
        return Docker(has_client=False)
    engine = ask(("docker", "version", "--format", "{{.Server.Version}}"), timeout_s=DOCKER_TIMEOUT_S)
    plugin = ask(("docker", "compose", "version", "--short"), timeout_s=DOCKER_TIMEOUT_S)
    alone = plugin if plugin.is_success else ask(("docker-compose", "version", "--short"), timeout_s=DOCKER_TIMEOUT_S)
    return Docker(
        has_client=True,
        engine=engine.output if engine.is_success else None,
        compose=alone.output.removeprefix("v") if alone.is_success else None,
        problem="" if engine.is_success else engine.last_error,
    )


def check(machine: Machine, *, has_torch: bool, needs_compiler: bool) -> list[Finding]:
    """Shared memory has a row only where something uses it."""
    shared_memory = _check_bytes(
        "shared memory",
        machine.shared_memory_bytes,
        MIN_SHARED_MEMORY_GIB,
        f"in {SHARED_MEMORY}",
        "start the container with --shm-size=8g, or shm_size in its Compose file",
    )
    return [
        _at_least("cores", machine.num_cores, MIN_CORES, "", "give the machine or container more cores"),
        *_check_bytes(
            "memory", machine.memory_bytes, MIN_MEMORY_GIB, "free memory", "stop other programs, or use a larger machine"
        ),
        *_check_bytes("disk", machine.disk_bytes, MIN_DISK_GIB, f"free at {machine.disk}", "make room, or set run.directory"),
        *(shared_memory if has_torch else []),
        _check_compiler(machine.compiler, needs_compiler=needs_compiler),
        _check_clock(machine.time_s),
    ]


def check_docker(docker: Docker) -> Finding:
    """Never more than a warning: `headrace up` needs no Docker."""
    rule = "Docker with Compose 2 is for running the services in containers, and for nothing else"
    if not docker.has_client:
        return ok("docker", "not installed", "only for running the services in containers")
    if docker.engine is None:
        remedy = "start the engine, or let this user use it"
        return warning("docker", f"no engine answers: {docker.problem}", rule, remedy)
    if docker.compose is None:
        return warning("docker", f"engine {docker.engine}, no Compose", rule, "install the Compose plugin")
    found = f"engine {docker.engine}, Compose {docker.compose}"
    if docker.compose.startswith("1."):
        return warning("docker", found, rule, "install the Compose plugin, version 2, as `docker compose`")
    return ok("docker", found, rule)


def _check_bytes(name: str, found: int | None, least_gib: int, what: str, remedy: str) -> list[Finding]:
    """No row where the system does not tell."""
    return [] if found is None else [_at_least(name, round(found / GIB, 1), least_gib, f" GiB {what}", remedy)]


def _at_least(name: str, found: float, least: float, unit: str, remedy: str) -> Finding:
    shown, rule = f"{found:g}{unit}", f">= {least:g}{unit}"
    return ok(name, shown, rule) if found >= least else warning(name, shown, rule, remedy)


def _check_compiler(compiler: str | None, *, needs_compiler: bool) -> Finding:
    rule = "DeepSpeed and SGLang compile parts of themselves at first use"
    if compiler is not None:
        return ok("c compiler", compiler, rule)
    if not needs_compiler:
        return ok("c compiler", "none, and neither of them is installed here", rule)
    return problem("c compiler", "none", rule, "install gcc or clang, with the headers of libc")


def _check_clock(time_s: float) -> Finding:
    found, rule = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(time_s)), "ids and records carry the time"
    if time_s >= EARLIEST_TIME_S:
        return ok("clock", found, rule)
    return problem("clock", found, rule, "set the clock, and keep it with NTP")


def _available_memory() -> int | None:
    """What this machine and, in a container, its limit leave."""
    bounds = [bound for bound in (_machine_memory(), _container_memory()) if bound is not None]
    return min(bounds, default=None)


def _machine_memory() -> int | None:
    try:
        match = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        return None
    return 1024 * int(match[1]) if match else None


def _container_memory() -> int | None:
    folder = Path("/sys/fs/cgroup")
    try:
        limit, used = (folder / "memory.max").read_text().strip(), (folder / "memory.current").read_text()
    except OSError:
        return None
    return None if limit == "max" else int(limit) - int(used)
