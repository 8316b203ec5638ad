"""`python -m trainer.launch`: the ranks of one machine under DeepSpeed's launcher, for containers and supervisors.

`deepspeed` itself starts that launcher too, but does not pass SIGTERM on to it: under a supervisor or as the first process of a
container, training would be killed instead of writing its checkpoint.
"""

import base64
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from shared.configuration import Configuration, load
from shared.errors import ConfigurationError
from shared.run_arguments import run_parser

EXAMPLES = """\
examples:
  python -m trainer.launch --config run.yaml
  CUDA_VISIBLE_DEVICES=4,5,6,7 python -m trainer.launch --config run.yaml --set trainer.num_processes=4
"""
MASTER_PORT = 29500


def launch_command(train_arguments: Sequence[str], *, slots: Sequence[str | int], master_port: int) -> tuple[str, ...]:
    """The launcher that `deepspeed` starts on each node, for one node with a rank on each of `slots` (GPU ids, or numbers)."""
    world = base64.urlsafe_b64encode(json.dumps({"localhost": list(slots)}).encode()).decode()
    return (
        *(sys.executable, "-m", "deepspeed.launcher.launch", f"--world_info={world}", "--master_addr=127.0.0.1"),
        *(f"--master_port={master_port}", "--no_local_rank", "--log_level=warning"),
        *(str(Path(__file__).with_name("train.py")), *train_arguments),
    )


def slots_of(configuration: Configuration, environment: Mapping[str, str]) -> list[str | int]:
    """`trainer.num_processes` GPUs of CUDA_VISIBLE_DEVICES, or the first ones. Raises: ConfigurationError if those are too few."""
    count = configuration.trainer.num_processes
    visible = [device.strip() for device in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if device.strip()]
    if visible and count > len(visible):
        raise ConfigurationError(
            f"trainer.num_processes must be <= the GPUs in CUDA_VISIBLE_DEVICES, got {count} and {','.join(visible)}; "
            "set one of them"
        )
    return [*visible[:count]] or [*range(count)]


def main() -> NoReturn:
    parser = run_parser(
        prog="python -m trainer.launch",
        description="Starts trainer.num_processes ranks of trainer/train.py on this machine.",
        epilog=EXAMPLES,
    )
    arguments = parser.parse_args()
    try:
        configuration = load(arguments.config, overrides=arguments.overrides)
        slots = slots_of(configuration, os.environ)
    except ConfigurationError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(2)
    overrides = [argument for override in arguments.overrides for argument in ("--set", override)]
    command = launch_command(["--config", str(arguments.config), *overrides], slots=slots, master_port=MASTER_PORT)
    accelerator = {"DS_ACCELERATOR": "cpu"} if configuration.engines.device == "cpu" else {}
    os.execve(command[0], command, {**os.environ, **accelerator})  # noqa: S606


if __name__ == "__main__":
    main()
