"""A tiny policy and one rank, for tests of the trainer."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.trainer.records import VOCABULARY
from tests.trainer.run_support import SmallDisk, serving_hub, trainers, working_agents, write_run_file

DEPRECATED_BY_TORCH = pytest.mark.filterwarnings("ignore:`torch.distributed:FutureWarning")
"""Collectives that DeepSpeed's ZeRO-3 calls by their old names."""


def make_model(seed: int = 0) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_factory() -> Callable[[int], Qwen3ForCausalLM]:
    return make_model


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny-model")
    make_model().save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def other_model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the same shape with other weights."""
    path = tmp_path_factory.mktemp("other-model")
    make_model(seed=1).save_pretrained(path)
    return path


@pytest.fixture
def free_port() -> int:
    """A port that was free a moment ago, for programs that cannot choose one themselves."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def deepspeed_on_two_ranks(free_port: int) -> tuple[str, ...]:
    """The launcher; a program and its arguments follow."""
    return (str(Path(sys.executable).with_name("deepspeed")), "--num_gpus", "2", "--master_port", str(free_port))


@pytest.fixture
def run_on_two_ranks(deepspeed_on_two_ranks: tuple[str, ...], repository: Path, tmp_path: Path) -> Callable[..., None]:
    """Runs a script of tests/trainer to its end."""

    def run(script: str, *arguments: str | Path, timeout_s: float) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(repository)}
        environment.pop("LOCAL_RANK", None)
        completed = subprocess.run(
            [*deepspeed_on_two_ranks, str(repository / "tests" / "trainer" / script), *map(str, arguments)],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        assert completed.returncode == 0, completed.stdout[-3000:] + completed.stderr[-3000:]

    return run


@pytest.fixture
def hub():
    with serving_hub() as hub:
        yield hub


@pytest.fixture
def agents(redis_url, keys):
    with working_agents(redis_url, keys) as agents:
        yield agents


@pytest.fixture
def run_file(tmp_path, model_path, redis_url, keys, hub):
    """The run file of a small run; its folder is the run directory."""
    return write_run_file(tmp_path, keys=keys, model_path=model_path, redis_url=redis_url, hub=hub)


@pytest.fixture
def start():
    with trainers() as start:
        yield start


@pytest.fixture
def small_disk(tmp_path):
    """Mounts a real file system of a limited size, such as "2500k"."""
    with ExitStack() as mounted:

        def mount(size):
            disk = SmallDisk(tmp_path / "small", size)
            mounted.callback(disk.unmount)
            return disk

        yield mount
