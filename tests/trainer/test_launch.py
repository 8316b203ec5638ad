"""What `python -m trainer.launch` becomes."""

import base64
import json

import pytest

from shared.configuration import Configuration, RunSection, TrainerSection
from shared.errors import ConfigurationError
from trainer.launch import launch_command, slots_of


def configuration(num_processes: int) -> Configuration:
    return Configuration(
        run=RunSection(id="run", directory="run", model_path="model"),
        trainer=TrainerSection(num_updates=1, num_processes=num_processes),
    )


@pytest.mark.parametrize(
    ("num_processes", "visible", "slots"),
    [(2, None, [0, 1]), (2, "4,5,6", ["4", "5"]), (1, "GPU-8f3a", ["GPU-8f3a"]), (1, "", [0])],
)
def test_ranks_get_the_visible_gpus_in_order(num_processes, visible, slots):
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert slots_of(configuration(num_processes), environment) == slots


def test_more_ranks_than_visible_gpus_are_refused_with_both_values():
    with pytest.raises(ConfigurationError, match=r"trainer\.num_processes must be <= .* got 4 and 0,1"):
        slots_of(configuration(4), {"CUDA_VISIBLE_DEVICES": "0,1"})


def test_launcher_is_told_the_slots_and_the_arguments_of_training():
    command = launch_command(["--config", "run.yaml"], slots=[0, 1], master_port=7)
    world = next(word for word in command if word.startswith("--world_info=")).partition("=")[2]
    assert json.loads(base64.urlsafe_b64decode(world)) == {"localhost": [0, 1]}
    assert command[-2:] == ("--config", "run.yaml")
    assert command[-3].endswith("trainer/train.py")
    assert "--master_port=7" in command
