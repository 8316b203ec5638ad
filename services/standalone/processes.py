"""What `headrace up` starts: the command line and environment of every process of a run, from its configuration alone."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from services.standalone.devices import share
from services.standalone.redis_server import redis_command
from shared.configuration import Configuration

STOP_TIMEOUT_S: Final = 15.0
TRAINER_STOP_TIMEOUT_S: Final = 40.0
"""For the update under way and its checkpoint."""


@dataclass(frozen=True)
class ProcessSpec:
    """One process to start. `environment` is added to this process's own; `stop_timeout_s` lies between SIGTERM and SIGKILL."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    stop_timeout_s: float = STOP_TIMEOUT_S


def redis_process(executable: str, *, port: int, directory: Path, access_file: Path) -> ProcessSpec:
    return ProcessSpec("redis", redis_command(executable, port=port, directory=directory, access_file=access_file))


def engine_process(
    configuration: Configuration, run_file: Path, *, index: int, port: int, num_cores: int, devices: Sequence[str]
) -> ProcessSpec:
    """The engine process number `index` of this machine, listening on `port`, on its share of the GPUs."""
    command = (*_module("services.engine", run_file), "--port", str(port))
    environment = {**_environment(), **_compute_threads(configuration, num_cores)}
    if configuration.engines.device == "cuda":
        size = configuration.engines.tensor_parallel_size
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(share(devices, first=index * size, count=size))
    return ProcessSpec(f"engine-{index}", command, environment)


def hub_process(run_file: Path) -> ProcessSpec:
    return ProcessSpec("hub", _module("services.inference_hub", run_file), {**_environment(), "OMP_NUM_THREADS": "1"})


def agents_process(run_file: Path, *, index: int = 0, port: int | None = None) -> ProcessSpec:
    """The agent process number `index` of this machine. `port` is that of `env_agents.port` if not given."""
    own = () if port is None else ("--set", f"env_agents.port={port}", "--set", "env_agents.url=null")
    command = (*_module("services.env_agents", run_file), *own)
    return ProcessSpec("agents" if index == 0 else f"agents-{index}", command, {**_environment(), "OMP_NUM_THREADS": "1"})


def trainer_process(
    configuration: Configuration, run_file: Path, *, master_port: int, num_cores: int, devices: Sequence[str]
) -> ProcessSpec:
    """One rank for each of `trainer.num_processes`, on the GPUs after the engines'."""
    environment = {**_environment(), **_compute_threads(configuration, num_cores)}
    num_ranks = configuration.trainer.num_processes
    if configuration.engines.device == "cuda":
        first = configuration.engines.count * configuration.engines.tensor_parallel_size
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(share(devices, first=first, count=num_ranks))
    else:
        environment["DS_ACCELERATOR"] = "cpu"
    command = (*_module("trainer.launch", run_file), "--master-port", str(master_port))
    return ProcessSpec("trainer", command, environment, TRAINER_STOP_TIMEOUT_S)


def _module(name: str, run_file: Path) -> tuple[str, ...]:
    return (sys.executable, "-m", name, "--config", str(run_file))


def _environment() -> dict[str, str]:
    return {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}


def _compute_threads(configuration: Configuration, num_cores: int) -> dict[str, str]:
    """Cores shared evenly by the processes that compute, unless the user has decided."""
    if "OMP_NUM_THREADS" in os.environ:
        return {}
    num_processes = configuration.engines.count + configuration.trainer.num_processes
    return {"OMP_NUM_THREADS": str(max(1, num_cores // num_processes))}
