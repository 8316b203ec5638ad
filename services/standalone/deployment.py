"""One machine's whole run: ports chosen, the resolved run file written, its processes in their stages, supervised."""

import asyncio
import contextlib
import fcntl
import os
import signal
from collections.abc import Callable, Collection, Coroutine, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from services.standalone import processes
from services.standalone.connections import redis_client
from services.standalone.devices import visible_devices
from services.standalone.keeper import Member
from services.standalone.observer import Observer
from services.standalone.ports import LOOPBACK, free_ports, require_free
from services.standalone.processes import ProcessSpec
from services.standalone.readiness import answers, redis_answers
from services.standalone.redis_server import redis_executable, redis_port, with_port, write_access
from services.standalone.restarts import NO_RESTARTS, RestartPolicy
from services.standalone.run_location import RUN_FILE
from services.standalone.supervisor import Stage, Supervisor
from shared import redis_address, redis_checks
from shared.configuration import Configuration, RedisSection, dump, load
from shared.errors import ConfigurationError

REDIS_READY_TIMEOUT_S: Final = 120.0
SERVICE_READY_TIMEOUT_S: Final = 120.0


@dataclass(frozen=True)
class Deployment:
    """What to start. `configuration` is the run file with every port decided; the new engines are the last of its urls."""

    configuration: Configuration
    has_external_redis: bool
    master_port: int
    other_agent_ports: tuple[int, ...] = ()
    """Of the agent processes beside the one at `env_agents.port`."""

    @property
    def directory(self) -> Path:
        return Path(self.configuration.run.directory)

    @property
    def run_file(self) -> Path:
        return self.directory / RUN_FILE

    @property
    def redis_password(self) -> str | None:
        return redis_address.password(self.configuration.redis.url)

    @property
    def engine_ports(self) -> list[int]:
        count = self.configuration.engines.count
        return [int(url.rpartition(":")[2]) for url in self.configuration.engines.urls[-count:]] if count else []


def plan(configuration: Configuration, *, has_external_redis: bool) -> Deployment:
    """Decides every port. Raises: ConfigurationError if one is taken, or a Redis that should run does not answer."""
    num_other_agents = configuration.up.agent_processes - 1
    ports = iter(free_ports(4 + configuration.engines.count + num_other_agents))
    sections = configuration.redis, configuration.inference_hub, configuration.env_agents, configuration.engines
    redis_section, hub, agents, engines = sections
    if has_external_redis:
        _require_redis(redis_section)
    else:
        port = redis_port(redis_section.url) or next(ports)
        require_free("the port of redis.url", LOOPBACK, port, to_choose=f"redis.url=redis://{LOOPBACK}:0/0")
        redis_section = msgspec.structs.replace(redis_section, url=with_port(redis_section.url, port))
    hub = msgspec.structs.replace(hub, port=hub.port or next(ports))
    require_free("inference_hub.port", hub.host, hub.port)
    agents = msgspec.structs.replace(agents, port=agents.port or next(ports))
    require_free("env_agents.port", agents.host, agents.port)
    started = _earlier_engines(configuration) or [f"http://{LOOPBACK}:{next(ports)}" for _ in range(engines.count)]
    engines = msgspec.structs.replace(engines, urls=(*engines.urls, *started))
    resolved = msgspec.structs.replace(configuration, redis=redis_section, inference_hub=hub, env_agents=agents, engines=engines)
    other_agents = tuple(next(ports) for _ in range(num_other_agents))
    return Deployment(resolved, has_external_redis, master_port=next(ports), other_agent_ports=other_agents)


def _earlier_engines(configuration: Configuration) -> list[str]:
    """Where this run's engines listened before it was stopped, so that the hub knows them again; nothing if that is not free."""
    try:
        earlier = load(Path(configuration.run.directory) / RUN_FILE, environment_variables={})
        urls = [url for url in earlier.engines.urls if url not in configuration.engines.urls]
        for url in urls:
            require_free("engines.urls", LOOPBACK, urlsplit(url).port or 0)
    except ConfigurationError:
        return []
    return urls if len(urls) == configuration.engines.count else []


def run(
    deployment: Deployment,
    observer: Observer,
    *,
    source: Path,
    before_shutdown: Callable[[], Coroutine[Any, Any, None]] | None = None,
) -> None:
    """Runs everything until the trainer has finished, and starts again what ends before. `source` is the user's run file.

    Raises: ProcessError if a process ends for good before; StopRequested on a signal; ConfigurationError if the run cannot start.
    """
    with _started(deployment, source) as lock:
        stages = [*_service_stages(deployment, lock), Stage([_trainer(deployment)])]
        up = deployment.configuration.up
        restarts = RestartPolicy(up.max_restarts, up.restart_window_s)
        live = partial(Supervisor.run, stages=stages, before_shutdown=before_shutdown)
        asyncio.run(_supervise(deployment, observer, live, restarts))


def serve(deployment: Deployment, observer: Observer, *, source: Path, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Runs everything but the trainer while `work` does its. Raises: as `run`, and what `work` raises."""
    with _started(deployment, source) as lock:
        stages = _service_stages(deployment, lock)
        asyncio.run(_supervise(deployment, observer, partial(Supervisor.serve, stages=stages, work=work), NO_RESTARTS))


@contextlib.contextmanager
def _started(deployment: Deployment, source: Path) -> Iterator[int]:
    """The run directory with the resolved run file in it, this process's alone; see `_only_run`."""
    if source.resolve() == deployment.run_file.resolve():
        raise ConfigurationError(
            f"run.directory must not hold the run file itself, because the resolved one is written to {deployment.run_file}; "
            "move yours, or set run.directory"
        )
    for name in ("logs", "redis"):
        (deployment.directory / name).mkdir(parents=True, exist_ok=True)
    with _only_run(deployment.directory) as lock:
        deployment.run_file.write_text(dump(deployment.configuration))
        yield lock


async def _supervise(
    deployment: Deployment, observer: Observer, live: Callable[[Supervisor], Coroutine[Any, Any, None]], restarts: RestartPolicy
) -> None:
    supervisor = Supervisor(deployment.directory / "logs", observer, restarts=restarts)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, supervisor.request_stop, number)
    await live(supervisor)


def _service_stages(deployment: Deployment, lock: int) -> list[Stage]:
    """Redis; then engines, hub and agents, which start side by side."""
    stages = [
        Stage([_engine(deployment, index, port) for index, port in enumerate(deployment.engine_ports)]),
        Stage([_hub(deployment)], needs_previous=False),
        Stage(_agents(deployment), needs_previous=False),
    ]
    return stages if deployment.has_external_redis else [Stage([_redis(deployment, [lock])]), *stages]


def _redis(deployment: Deployment, inherited: Collection[int]) -> Member:
    url = deployment.configuration.redis.url
    directory = deployment.directory / "redis"
    access_file = write_access(directory, deployment.redis_password)
    spec = processes.redis_process(redis_executable(), port=redis_port(url), directory=directory, access_file=access_file)
    return Member(spec, redis_answers(url), REDIS_READY_TIMEOUT_S, inherited)


def _engine(deployment: Deployment, index: int, port: int) -> Member:
    configuration = deployment.configuration
    spec = processes.engine_process(
        configuration, deployment.run_file, index=index, port=port, num_cores=_num_cores(), devices=visible_devices()
    )
    return Member(spec, answers(f"http://{LOOPBACK}:{port}/model_info"), configuration.engines.start_timeout_s)


def _hub(deployment: Deployment) -> Member:
    address = deployment.configuration.inference_hub.address
    spec = _with_password(deployment, processes.hub_process(deployment.run_file))
    return Member(spec, answers(f"{address}/health"), SERVICE_READY_TIMEOUT_S)


def _agents(deployment: Deployment) -> list[Member]:
    section = deployment.configuration.env_agents
    first = processes.agents_process(deployment.run_file)
    others = [
        (processes.agents_process(deployment.run_file, index=index, port=port), f"http://{section.host}:{port}")
        for index, port in enumerate(deployment.other_agent_ports, start=1)
    ]
    return [
        Member(_with_password(deployment, spec), answers(f"{address}/health"), SERVICE_READY_TIMEOUT_S)
        for spec, address in [(first, section.address), *others]
    ]


def _trainer(deployment: Deployment) -> Member:
    spec = processes.trainer_process(
        deployment.configuration,
        deployment.run_file,
        master_port=deployment.master_port,
        num_cores=_num_cores(),
        devices=visible_devices(),
    )
    return Member(_with_password(deployment, spec))


def _with_password(deployment: Deployment, spec: ProcessSpec) -> ProcessSpec:
    """A process that connects to Redis: the run file that it reads has no password."""
    password = deployment.redis_password
    if password is None:
        return spec
    return replace(spec, environment={**spec.environment, redis_address.PASSWORD_VARIABLE: password})


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))


def _require_redis(section: RedisSection) -> None:
    try:
        with redis_client(section.url) as client:
            redis_checks.require_usable(client, section)
    except ConfigurationError as error:
        raise ConfigurationError(
            f"{error}; without --external-redis and HEADRACE_REDIS_URL this command starts one of its own"
        ) from error


@contextlib.contextmanager
def _only_run(directory: Path) -> Iterator[int]:
    """Makes this the only run in `directory`, as long as the file descriptor it yields is open in any process.

    The Redis that it starts inherits it: after a kill, nobody else writes to its append-only file before it has ended.
    """
    with (directory / "redis" / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigurationError(
                f"run.directory must be used by one run at a time, and {str(directory)!r} is in use; stop the other `headrace up`, "
                "or set run.directory"
            ) from error
        yield lock.fileno()
