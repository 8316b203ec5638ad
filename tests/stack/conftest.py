"""Runs of the whole stack, each in a folder of its own."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.stack.standalone_run import StandaloneRun


@pytest.fixture
def new_run(tmp_path: Path, tiny_model: Path) -> Iterator[Callable[..., StandaloneRun]]:
    runs: list[StandaloneRun] = []

    def create(**settings: int) -> StandaloneRun:
        runs.append(StandaloneRun(tmp_path, tiny_model, **settings))
        return runs[-1]

    yield create
    for run in runs:
        run.stop()
