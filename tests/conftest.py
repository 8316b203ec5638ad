"""Fixtures that several folders of tests share: a real Redis with a fresh run in it."""

import os
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from services.standalone.redis_server import redis_executable
from shared.keys import Keys


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Redis of this test session's own, on a Unix socket."""
    folder = tmp_path_factory.mktemp("redis")
    socket = folder / "redis.sock"
    command = [redis_executable(), "--port", "0", "--unixsocket", str(socket), "--dir", str(folder), "--save", ""]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        url = f"unix://{socket}"
        client = redis.Redis.from_url(url, retry=redis.retry.Retry(redis.backoff.ConstantBackoff(0.05), 200))
        client.ping()
        client.close()
        yield url
        process.terminate()


@pytest.fixture
def keys(redis_url: str) -> Iterator[Keys]:
    """The keys of a run that exists for one test."""
    keys = Keys(f"test-{os.getpid()}-{uuid.uuid4().hex[:8]}")
    yield keys
    with redis.Redis.from_url(redis_url) as client:
        for key in client.scan_iter(f"*{{{keys.run_id}}}*"):
            client.delete(key)


@pytest.fixture
def redis_client(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as client:
        yield client


@pytest.fixture(scope="session")
def repository() -> Path:
    return Path(__file__).parents[1]
