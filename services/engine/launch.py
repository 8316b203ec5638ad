"""The run file's `engines` section → SGLang's own command line and environment. Pure functions."""

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from shared.configuration import Configuration, EnginesSection
from shared.errors import ConfigurationError

CPU_STAND_INS: Final = Path(__file__).parent / "cpu_stand_ins"
GPU_DEVICES: Final = ("nvidiactl", "dxg")
"""What NVIDIA's driver puts into /dev, on Linux and on Windows' Linux."""


def engine_command(configuration: Configuration, *, host: str, port: int) -> tuple[str, ...]:
    """`python -m sglang.launch_server` for one engine. The user's own arguments come last, so they win.

    The initial weights get the version label 0. With metrics, answers tell the time to their first token. SGLang's warm-up is left
    out because it waits for a generation that a CPU takes seconds for; the scheduler sleeps while idle because it would otherwise
    spin on a core that the trainer needs. Overlapped scheduling hides work behind a GPU's; without one it only labels a token with
    the version after the one that sampled it.
    """
    engines = configuration.engines
    command = [sys.executable, "-m", "sglang.launch_server"]
    command += ["--model-path", configuration.run.model_path, "--host", host, "--port", str(port)]
    command += ["--device", engines.device, "--dtype", engines.dtype, "--tensor-parallel-size", str(engines.tensor_parallel_size)]
    command += ["--weight-version", "0", "--random-seed", str(configuration.run.seed), "--log-level-http", "warning"]
    command += ["--enable-metrics"]
    if engines.device == "cpu":
        command += ["--attention-backend", "torch_native", "--disable-overlap-schedule"]
        command += ["--skip-server-warmup", "--sleep-on-idle"]
    if engines.max_total_tokens is not None:
        command += ["--max-total-tokens", str(engines.max_total_tokens)]
    if engines.mem_fraction_static is not None:
        command += ["--mem-fraction-static", str(engines.mem_fraction_static)]
    return (*command, *engines.arguments)


def engine_environment(configuration: Configuration, inherited: Mapping[str, str]) -> dict[str, str]:
    """The whole environment of the engine's process.

    `/health` must not generate a token: an engine that is paused for a weight update would look dead.
    """
    environment = {**inherited, "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}
    if configuration.engines.device == "cpu":
        path = inherited.get("PYTHONPATH")
        environment["PYTHONPATH"] = f"{CPU_STAND_INS}:{path}" if path else str(CPU_STAND_INS)
        environment["SGLANG_USE_CPU_ENGINE"] = "1"
        # SGLang receives each bucket of weights into new memory while generation is paused, and its first touch costs several times
        # the transfer in pages of 4 KiB.
        environment.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    return environment


def require_device(engines: EnginesSection, *, devices: Path = Path("/dev")) -> None:
    """Raises: ConfigurationError if the engine is for a GPU and none is visible, before SGLang takes a minute to find out."""
    if engines.device == "cuda" and not any((devices / name).exists() for name in GPU_DEVICES):
        raise ConfigurationError(
            "engines.device is cuda, and no NVIDIA GPU is visible here; start the engine where there is one (in a container, with "
            "the NVIDIA Container Toolkit and a GPU reserved, as docker-compose.gpu.yml does), or set engines.device=cpu"
        )


def require_sglang() -> None:
    """Raises: ConfigurationError if SGLang is not installed."""
    if importlib.util.find_spec("sglang") is None:
        raise ConfigurationError(
            "an engine needs the sglang package, which is not installed here; `make install` installs it for a CPU, and "
            "services/engine/README.md says how on GPUs"
        )
