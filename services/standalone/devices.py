"""Which GPUs each process of one machine gets."""

import os
from collections.abc import Sequence
from pathlib import Path

from shared.errors import ConfigurationError


def visible_devices() -> tuple[str, ...]:
    """Names of the GPUs that this process may use: CUDA_VISIBLE_DEVICES, else all of the machine's."""
    if (allowed := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return tuple(name.strip() for name in allowed.split(",") if name.strip())
    numbers = [path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*")]
    return tuple(sorted(numbers, key=int))


def share(devices: Sequence[str], *, first: int, count: int) -> tuple[str, ...]:
    """`count` devices from number `first` on. Where they run out it starts again at 0, so that processes share devices.

    Raises: ConfigurationError if one process would need more devices than there are.
    """
    if count > len(devices):
        raise ConfigurationError(
            f"one process of this run needs {count} GPUs and this machine shows {len(devices)}; lower "
            "engines.tensor_parallel_size or trainer.num_processes, or set engines.device=cpu"
        )
    return tuple(devices[(first + offset) % len(devices)] for offset in range(count))
