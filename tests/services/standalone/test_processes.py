from pathlib import Path

import pytest

from services.standalone import processes
from shared import strict_yaml
from shared.configuration import Configuration

RUN_FILE = Path("runs/x/run.yaml")


@pytest.fixture(autouse=True)
def _no_thread_setting(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def configuration(**sections: dict) -> Configuration:
    raw = {"run": {"id": "x", "directory": "runs/x", "model_path": "model"}, "trainer": {"num_updates": 1}}
    for name, values in sections.items():
        raw[name] = {**raw.get(name, {}), **values}
    return strict_yaml.decode(raw, Configuration, source="test")


def test_redis_listens_on_loopback_only_and_keeps_an_append_only_file_in_its_directory():
    spec = processes.redis_process("redis-server", port=7000, directory=Path("runs/x/redis"), access_file=Path("access.conf"))
    words = " ".join(spec.command)
    for expected in ("--bind 127.0.0.1", "--port 7000", "--dir runs/x/redis", "--appendonly yes", "--appendfsync always"):
        assert expected in words


def test_what_clients_of_redis_may_do_is_in_a_file_and_not_on_the_command_line():
    spec = processes.redis_process("redis-server", port=7000, directory=Path("redis"), access_file=Path("redis/access.conf"))
    assert spec.command[:2] == ("redis-server", "redis/access.conf")


def test_every_process_reads_the_resolved_run_file():
    run = configuration(engines={"device": "cpu"})
    specs = [
        processes.engine_process(run, RUN_FILE, index=0, port=7001, num_cores=2, devices=()),
        processes.hub_process(RUN_FILE),
        processes.agents_process(RUN_FILE),
        processes.trainer_process(run, RUN_FILE, master_port=7002, num_cores=2, devices=()),
    ]
    for spec in specs:
        assert spec.command[spec.command.index("--config") + 1] == str(RUN_FILE)


def test_cpu_ranks_are_started_by_the_trainers_launcher():
    run = configuration(engines={"device": "cpu"}, trainer={"num_processes": 2})
    spec = processes.trainer_process(run, RUN_FILE, master_port=7002, num_cores=4, devices=())
    assert spec.command[1:] == ("-m", "trainer.launch", "--config", str(RUN_FILE), "--master-port", "7002")
    assert spec.environment["DS_ACCELERATOR"] == "cpu"


def test_gpus_go_to_engines_first_and_to_ranks_after_them():
    run = configuration(engines={"device": "cuda", "count": 2, "tensor_parallel_size": 2}, trainer={"num_processes": 2})
    devices = tuple("01234567")
    engine = processes.engine_process(run, RUN_FILE, index=1, port=7001, num_cores=8, devices=devices)
    trainer = processes.trainer_process(run, RUN_FILE, master_port=7002, num_cores=8, devices=devices)
    assert engine.environment["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert trainer.environment["CUDA_VISIBLE_DEVICES"] == "4,5"


@pytest.mark.parametrize(("num_cores", "threads"), [(1, "1"), (2, "1"), (8, "4")])
def test_cores_are_shared_by_the_processes_that_compute(num_cores, threads):
    run = configuration(engines={"device": "cpu"})
    spec = processes.trainer_process(run, RUN_FILE, master_port=7002, num_cores=num_cores, devices=())
    assert spec.environment["OMP_NUM_THREADS"] == threads


def test_number_of_threads_that_the_user_set_stands(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    run = configuration(engines={"device": "cpu"})
    spec = processes.trainer_process(run, RUN_FILE, master_port=7002, num_cores=8, devices=())
    assert "OMP_NUM_THREADS" not in spec.environment
