"""`python -m trainer.launch`: the ranks of one machine as child processes, for containers and supervisors.

SIGTERM and SIGINT go on to every rank, and the ranks have all the time they need for their checkpoint: how long is for whoever sent
the signal to say. The exit status is 0 when every rank's is. `deepspeed` itself does not pass SIGTERM on, and the launcher that it
starts on each node kills its ranks 30 s after SIGTERM and exits with 1 even if they have stopped cleanly.
"""

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from shared.configuration import Configuration, load
from shared.errors import ConfigurationError
from shared.run_arguments import BAD_INPUT, run_parser

EXAMPLES = """\
examples:
  python -m trainer.launch --config run.yaml
  CUDA_VISIBLE_DEVICES=4,5,6,7 python -m trainer.launch --config run.yaml --set trainer.num_processes=4
"""
MASTER_PORT = 29500
POLL_S = 0.2
ABORT_S = 30.0
"""What ranks have to end after another one has failed: they may be writing a checkpoint, or wait for the one that is gone."""


def visible_devices(configuration: Configuration, environment: Mapping[str, str]) -> list[str]:
    """`trainer.num_processes` GPUs of CUDA_VISIBLE_DEVICES, or the first ones. Raises: ConfigurationError if those are too few."""
    count = configuration.trainer.num_processes
    visible = [device.strip() for device in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if device.strip()]
    if visible and count > len(visible):
        raise ConfigurationError(
            f"trainer.num_processes must be <= the GPUs in CUDA_VISIBLE_DEVICES, got {count} and {','.join(visible)}; "
            "set one of them"
        )
    return visible[:count] or [str(device) for device in range(count)]


def rank_environments(devices: Sequence[str], *, is_cpu: bool, master_port: int) -> list[dict[str, str]]:
    """What each rank has in its environment besides this process's, as torch and DeepSpeed look for it."""
    count = str(len(devices))
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(master_port),
        "WORLD_SIZE": count,
        "LOCAL_SIZE": count,
        "CROSS_RANK": "0",
        "CROSS_SIZE": "1",
        **({"DS_ACCELERATOR": "cpu"} if is_cpu else {"CUDA_VISIBLE_DEVICES": ",".join(devices)}),
    }
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(len(devices))]


class RankProcesses:
    """RUNNING → all ended. The first to fail ends the others."""

    def __init__(self, commands: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]]) -> None:
        self._processes = [
            subprocess.Popen(command, env={**os.environ, **environment})
            for command, environment in zip(commands, environments, strict=True)
        ]

    def send(self, number: int, frame: FrameType | None = None) -> None:
        """A signal to every rank that runs."""
        for process in self._processes:
            process.send_signal(number)

    def wait(self) -> int:
        """Their exit status: 0, or that of the first to fail, as a shell tells it."""
        failed, deadline = 0, math.inf
        while True:
            statuses = self._poll()
            if not failed and (failed := next(filter(None, statuses), 0)):
                deadline = time.monotonic() + ABORT_S
                self.send(signal.SIGTERM)
            if None not in statuses:
                return failed if failed >= 0 else 128 - failed
            if time.monotonic() > deadline:
                self.send(signal.SIGKILL)
            time.sleep(POLL_S)

    def _poll(self) -> list[int | None]:
        """Of every rank: one that runs must not hide another that has failed."""
        return [process.poll() for process in self._processes]


def main() -> int:
    parser = run_parser(
        prog="python -m trainer.launch",
        description="Starts trainer.num_processes ranks of trainer/train.py on this machine.",
        epilog=EXAMPLES,
    )
    parser.add_argument("--master-port", type=int, default=MASTER_PORT, help="where the ranks meet, on 127.0.0.1")
    arguments = parser.parse_args()
    try:
        configuration = load(arguments.config, overrides=arguments.overrides)
        devices = visible_devices(configuration, os.environ)
    except ConfigurationError as error:
        sys.stderr.write(f"{error}\n")
        return BAD_INPUT
    overrides = [argument for override in arguments.overrides for argument in ("--set", override)]
    command = [sys.executable, str(Path(__file__).with_name("train.py")), "--config", str(arguments.config), *overrides]
    # Before the ranks are there, a signal must not end this process and leave them.
    wanted: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: wanted.append(number))
    environments = rank_environments(devices, is_cpu=configuration.engines.device == "cpu", master_port=arguments.master_port)
    ranks = RankProcesses([command] * len(devices), environments)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, ranks.send)
    for early in wanted:
        ranks.send(early)
    return ranks.wait()


if __name__ == "__main__":
    sys.exit(main())
