"""Run files that are given as examples."""

from pathlib import Path

import pytest

from shared import configuration

RUN_FILES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))


@pytest.mark.parametrize("path", RUN_FILES, ids=lambda path: path.name)
def test_run_files_are_ones_that_the_processes_accept(path):
    read = configuration.read(path)
    assert read.env_agents.environments
    assert read.engines.dtype == read.trainer.dtype
