import sys

import pytest

from services.engine import launch
from services.engine.launch import CPU_STAND_INS, engine_command, engine_environment, require_device, require_sglang
from shared.configuration import Configuration, EnginesSection, RunSection, TrainerSection
from shared.errors import ConfigurationError


def configuration(**engines):
    return Configuration(
        run=RunSection(id="run", directory="runs/run", model_path="models/tiny", seed=7),
        engines=EnginesSection(**engines),
        trainer=TrainerSection(num_updates=1),
    )


def command(**engines):
    return engine_command(configuration(**engines), host="127.0.0.1", port=30000)


def value_of(command, flag):
    return command[command.index(flag) + 1]


def test_command_is_the_stock_server_of_this_python():
    assert command()[:3] == (sys.executable, "-m", "sglang.launch_server")


def test_model_address_and_seed_come_from_the_run_file():
    stock = command()
    assert value_of(stock, "--model-path") == "models/tiny"
    assert (value_of(stock, "--host"), value_of(stock, "--port")) == ("127.0.0.1", "30000")
    assert value_of(stock, "--random-seed") == "7"


def test_initial_weights_are_version_0():
    assert value_of(command(), "--weight-version") == "0"


def test_cpu_engine_takes_native_pytorch_and_leaves_the_core_while_idle():
    cpu = command(device="cpu", dtype="float32")
    assert value_of(cpu, "--device") == "cpu"
    assert value_of(cpu, "--dtype") == "float32"
    assert value_of(cpu, "--attention-backend") == "torch_native"
    assert {"--skip-server-warmup", "--sleep-on-idle"} <= set(cpu)


def test_gpu_engine_keeps_sglangs_own_choices():
    gpu = command(device="cuda", tensor_parallel_size=4)
    assert value_of(gpu, "--tensor-parallel-size") == "4"
    assert not {"--attention-backend", "--skip-server-warmup", "--sleep-on-idle"} & set(gpu)


def test_memory_limits_are_passed_only_if_given():
    assert not {"--max-total-tokens", "--mem-fraction-static"} & set(command())
    limited = command(max_total_tokens=20000, mem_fraction_static=0.2)
    assert value_of(limited, "--max-total-tokens") == "20000"
    assert value_of(limited, "--mem-fraction-static") == "0.2"


def test_users_own_arguments_come_last():
    assert command(arguments=("--log-level", "debug"))[-2:] == ("--log-level", "debug")


def test_stand_ins_are_first_on_the_path_of_a_cpu_engine():
    environment = engine_environment(configuration(device="cpu"), {"PYTHONPATH": "/mine", "HOME": "/home/me"})
    assert environment["PYTHONPATH"] == f"{CPU_STAND_INS}:/mine"
    assert environment["SGLANG_USE_CPU_ENGINE"] == "1"
    assert environment["HOME"] == "/home/me"
    assert environment["THP_MEM_ALLOC_ENABLE"] == "1"


def test_gpu_engine_sees_no_stand_ins():
    environment = engine_environment(configuration(device="cuda"), {})
    assert "PYTHONPATH" not in environment
    assert "SGLANG_USE_CPU_ENGINE" not in environment


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_health_does_not_generate(device):
    assert engine_environment(configuration(device=device), {})["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] == "0"


def test_missing_sglang_is_a_sentence_with_a_remedy(monkeypatch):
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match="sglang package, which is not installed here; `make install`"):
        require_sglang()


@pytest.mark.parametrize(("device", "found"), [("cuda", ["nvidiactl"]), ("cuda", ["dxg"]), ("cpu", [])])
def test_engine_is_started_where_its_device_is(tmp_path, device, found):
    for name in found:
        (tmp_path / name).touch()
    require_device(EnginesSection(device=device), devices=tmp_path)


def test_engine_for_a_gpu_that_is_not_there_is_a_sentence_with_the_remedy(tmp_path):
    with pytest.raises(ConfigurationError, match=r"engines\.device is cuda, and no NVIDIA GPU .* set engines\.device=cpu"):
        require_device(EnginesSection(device="cuda"), devices=tmp_path)
