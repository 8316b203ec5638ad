"""A Redis for one benchmark, on a Unix socket of its own."""

import contextlib
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.waiting import wait_until
from services.standalone.redis_server import redis_executable

START_TIMEOUT_S = 20.0


def redis_command(socket: Path, *, append_only: bool) -> list[str]:
    """What serves at `socket`, and keeps its files beside it."""
    durability = ["--save", "", "--appendonly", "yes" if append_only else "no"]
    return [redis_executable(), "--port", "0", "--unixsocket", str(socket), "--dir", str(socket.parent), *durability]


@contextlib.contextmanager
def served_redis() -> Iterator[str]:
    """Serves while the context is open; yields the address. Nothing is kept."""
    with tempfile.TemporaryDirectory() as folder:
        socket = Path(folder) / "redis.sock"
        with subprocess.Popen(redis_command(socket, append_only=False), stdout=subprocess.DEVNULL) as process:
            try:
                wait_until(socket.exists, "Redis listens", timeout_s=START_TIMEOUT_S, process=process)
                yield f"unix://{socket}"
            finally:
                process.terminate()
