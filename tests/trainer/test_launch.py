"""`python -m trainer.launch`: which ranks it starts, and how it ends with them."""

import signal
import sys

import pytest

from shared.configuration import Configuration, RunSection, TrainerSection
from shared.errors import ConfigurationError
from tests.trainer.run_support import finished
from trainer.launch import RankProcesses, rank_environments, visible_devices


def configuration(num_processes: int) -> Configuration:
    return Configuration(
        run=RunSection(id="run", directory="run", model_path="model"),
        trainer=TrainerSection(num_updates=1, num_processes=num_processes),
    )


@pytest.mark.parametrize(
    ("num_processes", "visible", "devices"),
    [(2, None, ["0", "1"]), (2, "4,5,6", ["4", "5"]), (1, "GPU-8f3a", ["GPU-8f3a"]), (1, "", ["0"])],
)
def test_ranks_get_the_visible_gpus_in_order(num_processes, visible, devices):
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert visible_devices(configuration(num_processes), environment) == devices


def test_more_ranks_than_visible_gpus_are_refused_with_both_values():
    with pytest.raises(ConfigurationError, match=r"trainer\.num_processes must be <= .* got 4 and 0,1"):
        visible_devices(configuration(4), {"CUDA_VISIBLE_DEVICES": "0,1"})


def test_each_rank_knows_its_place():
    first, second = rank_environments(["4", "5"], is_cpu=False, master_port=7)
    assert (first["RANK"], second["RANK"], second["LOCAL_RANK"], second["WORLD_SIZE"]) == ("0", "1", "1", "2")
    assert (first["CUDA_VISIBLE_DEVICES"], first["MASTER_PORT"]) == ("4,5", "7")
    assert "CUDA_VISIBLE_DEVICES" not in rank_environments(["0"], is_cpu=True, master_port=7)[0]


WAIT_FOR_SIGTERM = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
while True:
    time.sleep(0.05)
"""


def python(source: str) -> list[str]:
    return [sys.executable, "-c", source]


def test_a_rank_that_fails_ends_the_others_and_its_status_is_the_launchers():
    ranks = RankProcesses([python(WAIT_FOR_SIGTERM), python("raise SystemExit(3)")], [{}, {}])
    assert ranks.wait() == 3


def test_a_rank_that_a_signal_ended_has_a_shells_status():
    assert RankProcesses([python("import os; os.kill(os.getpid(), 9)")], [{}]).wait() == 128 + 9


def test_ranks_that_all_succeed_are_a_success():
    assert RankProcesses([python(""), python("")], [{}, {}]).wait() == 0


@pytest.mark.stack
@pytest.mark.timeout(240)
def test_sigterm_to_the_launcher_leaves_a_checkpoint_and_status_0(start, run_file, agents, free_port):
    process = start(
        run_file,
        "trainer.num_updates=1000",
        "trainer.num_processes=2",
        "trainer.checkpoint.every_updates=1000",
        program=("-m", "trainer.launch", "--master-port", str(free_port)),
    )
    for line in process.stdout:
        if line.startswith("update 2/"):
            break
    process.send_signal(signal.SIGTERM)
    status, _, errors = finished(process)
    assert status == 0, errors
    (path,) = (run_file.parent / "checkpoints").iterdir()
    assert int(path.name[1:]) >= 2
    assert sorted(file.name for file in (path / "ranks").iterdir()) == ["00000.msgpack", "00001.msgpack"]
