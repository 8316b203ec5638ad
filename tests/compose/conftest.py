"""A composed stack in a Docker engine, from the project's own Dockerfile; one for most tests, because it takes minutes."""

import logging
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.compose.base_images import base_images
from tests.compose.docker_engine import Docker, NoEngineError, docker_engine
from tests.compose.stack import ComposedStack, run_file

logger = logging.getLogger(__name__)


@pytest.fixture(scope="session")
def docker() -> Iterator[Docker]:
    try:
        with docker_engine() as engine:
            yield engine
    except NoEngineError as error:
        logger.warning("NOT TESTED: the composed stack. %s", error)
        pytest.skip(f"NOT TESTED: the composed stack. {error}")


@pytest.fixture(scope="session")
def images(docker: Docker, repository: Path) -> Iterator[Docker]:
    """Every image of docker-compose.yml, built."""
    with tempfile.TemporaryDirectory(prefix="headrace-stand-ins-") as folder, base_images(docker, Path(folder)):
        ComposedStack(docker, repository, Path(folder)).compose("build")
        yield docker


@pytest.fixture(scope="session")
def new_stack(images: Docker, repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., ComposedStack]]:
    """Makes stacks with the run file given; nothing of them is left afterwards."""
    stacks: list[ComposedStack] = []

    def create(*, redis_password: str = "", **run: Any) -> ComposedStack:
        stacks.append(ComposedStack(images, repository, tmp_path_factory.mktemp("compose"), redis_password=redis_password))
        stacks[-1].write_run_file(run_file(repository, **run))
        return stacks[-1]

    yield create
    for composed in stacks:
        composed.compose("down", "--volumes", "--timeout", "10")


@pytest.fixture(scope="session")
def stack(new_stack: Callable[..., ComposedStack]) -> ComposedStack:
    """Two agent processes, one engine, and a trainer that has ended after 3 updates. `chain` was registered meanwhile."""
    composed = new_stack(run_id="composed", num_updates=3)
    composed.compose("up", "--detach", "--scale", "env-agents=2")
    chain = {"name": "chain", "import_path": "examples.lookup_chain:LookupChain", "weight": 0.25, "limits": {"max_turns": 2}}
    registered = httpx.post(f"{composed.agents}/environments", json=chain, timeout=60)
    assert registered.status_code == 201, registered.text
    composed.wait_until(lambda: composed.trainer_exit_code() is not None, description="the end of training")
    assert composed.trainer_exit_code() == 0, composed.logs("trainer")
    return composed
