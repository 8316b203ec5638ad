import pytest

from services.standalone.doctor import gpus
from services.standalone.doctor.finding import Severity
from services.standalone.doctor.gpus import Gpus, TorchView
from shared import strict_yaml
from shared.configuration import Configuration

H200 = "NVIDIA H200, 143771 MiB"


def configuration(*, backend: str = "nccl", num_processes: int = 1, **engines) -> Configuration:
    raw = {
        "run": {"id": "x", "directory": "runs/x", "model_path": "model"},
        "engines": engines,
        "trainer": {"num_updates": 1, "num_processes": num_processes, "weight_push": {"backend": backend}},
    }
    return strict_yaml.decode(raw, Configuration, source="test")


def seen(count: int, *, cuda: str | None = "13.0", nccl: str | None = "2.28.3") -> Gpus:
    return Gpus((H200,) * count, TorchView(cuda, count, nccl))


def rows(facts: Gpus, run: Configuration | None) -> dict[str, tuple[Severity, str]]:
    return {one.check: (one.severity, one.remedy) for one in gpus.check(facts, run)}


def test_run_that_asks_for_gpus_where_there_are_none_is_a_problem_with_the_way_out():
    severity, remedy = rows(Gpus((), None), configuration())["gpus"]
    assert severity is Severity.PROBLEM
    assert "engines.device=cpu" in remedy
    assert "GPU machine" in remedy


@pytest.mark.parametrize(("count", "has_torch"), [(0, True), (1, False)])
def test_machine_that_starts_no_engine_may_have_no_gpu(count, has_torch):
    """As a container with the agents alone."""
    assert rows(Gpus((), None, has_torch=has_torch), configuration(count=count))["gpus"][0] is Severity.WARNING


def test_cpu_run_needs_no_gpu_and_no_nccl():
    assert rows(Gpus((), None), configuration(device="cpu", backend="gloo")) == {"gpus": (Severity.OK, "")}


def test_nccl_between_cpus_is_a_problem():
    severity, remedy = rows(Gpus((), None), configuration(device="cpu"))["nccl"]
    assert (severity, remedy) == (Severity.PROBLEM, "set trainer.weight_push.backend=gloo")


def test_torch_for_cpus_beside_a_gpu_is_a_problem():
    facts = Gpus((H200,), TorchView(None, 0, None))
    found = rows(facts, configuration())
    assert found["gpus"] == (Severity.PROBLEM, "install a torch built for CUDA: this one is for CPUs")
    assert found["nccl"][0] is Severity.PROBLEM
    assert rows(facts, None)["gpus"][0] is Severity.WARNING


def test_driver_that_is_too_old_for_torch_is_named():
    assert "suits CUDA 13.0" in rows(Gpus((H200,), TorchView("13.0", 0, None)), configuration())["gpus"][1]


@pytest.mark.parametrize(
    ("count", "severity"), [(4, Severity.OK), (3, Severity.WARNING), (2, Severity.WARNING), (1, Severity.PROBLEM)]
)
def test_gpus_are_counted_against_engines_and_ranks(count, severity):
    """One engine of two GPUs and two ranks: each may share with the other, and none can do with one."""
    found = rows(seen(count), configuration(tensor_parallel_size=2, num_processes=2))
    assert found["gpus"][0] is severity


def test_nccl_that_is_there_shows_its_version():
    found = {one.check: one for one in gpus.check(seen(2), configuration())}
    assert (found["nccl"].severity, found["nccl"].found) == (Severity.OK, "2.28.3")


def test_without_torch_the_driver_counts_and_nccl_is_not_known():
    found = rows(Gpus((H200, H200), None, "torch is not installed", has_torch=False), configuration())
    assert found["gpus"][0] is Severity.OK
    assert found["nccl"][0] is Severity.WARNING
