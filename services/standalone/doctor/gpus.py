"""GPUs, as the driver and as torch see them, against what the run asks for."""

import sys
from dataclasses import dataclass
from typing import Final

import msgspec

from services.standalone.doctor.finding import Finding, ok, problem, warning
from services.standalone.doctor.programs import ask
from shared.configuration import Configuration

DRIVER_TIMEOUT_S: Final = 20.0
TORCH_TIMEOUT_S: Final = 90.0
"""Importing torch from a cold disk takes half a minute."""
DRIVER_COMMAND: Final = ("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader")
TORCH_PROGRAM: Final = """
import json, torch
try:
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
except Exception:
    nccl = None
print(json.dumps({"cuda": torch.version.cuda, "num_devices": torch.cuda.device_count(), "nccl": nccl}))
"""


class TorchView(msgspec.Struct, frozen=True):
    """What torch says. `cuda` and `nccl` are versions; None in a build without."""

    cuda: str | None
    num_devices: int
    nccl: str | None


@dataclass(frozen=True)
class Gpus:
    """`names` are the driver's, one a GPU, with its memory. `torch` is None where it is not installed or does not answer."""

    names: tuple[str, ...]
    torch: TorchView | None
    torch_problem: str = ""
    has_torch: bool = True
    """It is installed, whether or not it answers."""

    @property
    def count(self) -> int:
        return self.torch.num_devices if self.torch else len(self.names)


def look(*, has_torch: bool) -> Gpus:
    driver = ask(DRIVER_COMMAND, timeout_s=DRIVER_TIMEOUT_S)
    names = tuple(line.strip() for line in driver.output.splitlines() if line.strip()) if driver.is_success else ()
    if not has_torch:
        return Gpus(names, None, "torch is not installed", has_torch=False)
    reply = ask([sys.executable, "-c", TORCH_PROGRAM], timeout_s=TORCH_TIMEOUT_S)
    if not reply.is_success:
        return Gpus(names, None, reply.last_error)
    return Gpus(names, msgspec.json.decode(reply.output.splitlines()[-1], type=TorchView))


def check(gpus: Gpus, configuration: Configuration | None) -> list[Finding]:
    """Rows of the GPUs and of NCCL; without a run file, of what there is."""
    if configuration is None:
        return [_check_machine(gpus)]
    rows = [_check_devices(gpus, configuration)]
    return [*rows, _check_nccl(gpus, configuration)] if configuration.trainer.weight_push.backend == "nccl" else rows


def _check_machine(gpus: Gpus) -> Finding:
    rule = "engines.device: cuda needs a GPU that torch can use; cpu needs none"
    if gpus.names and gpus.count == 0:
        return warning("gpus", f"{_described(gpus)}, of which torch can use none", rule, _build_remedy(gpus))
    return ok("gpus", _described(gpus), rule)


def _check_devices(gpus: Gpus, configuration: Configuration) -> Finding:
    engines, num_ranks = configuration.engines, configuration.trainer.num_processes
    if engines.device == "cpu":
        return ok("gpus", _described(gpus), "engines.device: cpu uses none")
    for_one = max(engines.tensor_parallel_size if engines.count else 0, num_ranks)
    for_all = engines.count * engines.tensor_parallel_size + num_ranks
    rule = f"engines.device: cuda needs {for_one} GPUs for one process, {for_all} for each process to have its own"
    if gpus.count == 0:
        if gpus.names:
            return problem("gpus", f"{_described(gpus)}, of which torch can use none", rule, _build_remedy(gpus))
        # Without torch, or engines to start, this may be a machine that only looks on.
        judge = problem if gpus.has_torch and engines.count else warning
        remedy = (
            "run it on the GPU machine, or set engines.device=cpu, engines.dtype=float32, trainer.dtype=float32 and "
            "trainer.weight_push.backend=gloo"
        )
        return judge("gpus", "none", rule, remedy)
    if gpus.count < for_one:
        return problem("gpus", _described(gpus), rule, "lower engines.tensor_parallel_size or trainer.num_processes")
    if gpus.count < for_all:
        remedy = "give the run more GPUs, or see to it that engines.mem_fraction_static leaves the trainer room"
        return warning("gpus", f"{_described(gpus)}: processes will share them", rule, remedy)
    return ok("gpus", _described(gpus), rule)


def _check_nccl(gpus: Gpus, configuration: Configuration) -> Finding:
    rule = "trainer.weight_push.backend: nccl moves weights between GPUs"
    if configuration.engines.device == "cpu":
        return problem("nccl", "engines.device: cpu", rule, "set trainer.weight_push.backend=gloo")
    if gpus.torch is None:
        return warning("nccl", f"not known: {gpus.torch_problem}", rule, "run `headrace doctor` where engines and trainer run")
    if gpus.torch.nccl is None:
        remedy = "install a torch built for CUDA, or set trainer.weight_push.backend=gloo"
        return problem("nccl", "this torch has none", rule, remedy)
    return ok("nccl", gpus.torch.nccl, rule)


def _build_remedy(gpus: Gpus) -> str:
    if gpus.torch is None:
        return f"see why torch does not answer: {gpus.torch_problem}"
    if gpus.torch.cuda is None:
        return "install a torch built for CUDA: this one is for CPUs"
    return f"install a driver that suits CUDA {gpus.torch.cuda}, and look at CUDA_VISIBLE_DEVICES"


def _described(gpus: Gpus) -> str:
    if gpus.names:
        return "; ".join(gpus.names)
    return f"{gpus.count}, seen by torch alone" if gpus.count else "none"
