"""The address of Redis with its secret: `redis.url` of the run file, and the password that only the environment carries.

    client = redis.Redis.from_url(connection_url(configuration.redis.url), protocol=PROTOCOL)

A URL with its password is made where a client is made, and goes nowhere else: what is written or printed has none.
"""

import os
import re
from collections.abc import Mapping
from typing import Final
from urllib.parse import quote, unquote, urlsplit

from shared.errors import ConfigurationError
from shared.secret_values import read_secret

PASSWORD_VARIABLE: Final = "HEADRACE_REDIS_PASSWORD"  # noqa: S105 - a name
PASSWORD_FILE_VARIABLE: Final = "HEADRACE_REDIS_PASSWORD_FILE"  # noqa: S105 - a name
"""Path of a file that holds the password, as Docker and Kubernetes mount secrets."""
HOW_TO_GIVE: Final = f"{PASSWORD_VARIABLE}, or in a file that {PASSWORD_FILE_VARIABLE} names"
PROTOCOL: Final = 2
"""Of every connection. Over RESP3 redis-py 8 listens for notices of maintenance, and does not look whether Redis has closed an idle
connection: after a restart of Redis each of them would fail a command, minutes later."""

_URL = re.compile(r"(?P<scheme>rediss?|unix)://(?:(?P<user>[^:@/?#\s]*)(?::(?P<password>[^@/?#\s]*))?@)?(?P<location>[^@\s]+)")
_QUERY_PASSWORD = re.compile(r"([?&]password=)[^&#\s'\"]*")
_USER_PASSWORD = re.compile(r"((?:^|://)[^:@/?#\s]*):(?!//)[^\n]*@")
"""Up to the last @: a password with an @ or a / of its own is masked whole."""


def connection_url(url: str, environment_variables: Mapping[str, str] = os.environ) -> str:
    """`url` with the password in it, for a client to connect with. Raises: ConfigurationError, without the password."""
    from redis.connection import parse_url  # Here, because the engine's process reads the run file without it.

    found = password(url, environment_variables)
    try:
        parse_url(url)  # type: ignore[no-untyped-call]
    except ValueError as error:
        raise ConfigurationError(f"redis.url must have options that redis-py knows, got {masked(url)!r}: {error}") from None
    if found is None:
        return url
    parts = _parsed(url)
    return f"{parts['scheme']}://{parts['user'] or ''}:{quote(found, safe='')}@{parts['location']}"


def password(url: str, environment_variables: Mapping[str, str] = os.environ) -> str | None:
    """The password for the Redis at `url`, from the environment or from the URL itself; None if it is given in neither.

    Raises: ConfigurationError if two of them contradict each other, or the file cannot be read.
    """
    encoded = _parsed(url)["password"]
    in_url = unquote(encoded) if encoded else None
    in_environment = read_secret(PASSWORD_VARIABLE, "the password of Redis", environment_variables)
    if in_url is not None and in_environment is not None and in_url != in_environment:
        raise ConfigurationError(
            f"the password of Redis must be given once, and redis.url ({masked(url)}) has another one than the environment; "
            f"leave it out of redis.url and give it in {HOW_TO_GIVE}"
        )
    return in_url if in_environment is None else in_environment


def without_password(url: str) -> str:
    """`url` as it may be written to a file; a user name stays. Raises: ConfigurationError if it is no address of a Redis."""
    parts = _parsed(url)
    user = f"{parts['user']}@" if parts["user"] else ""
    return f"{parts['scheme']}://{user}{parts['location']}"


def masked(text: str) -> str:
    """`text` as it may be shown: `***` in place of the password of a URL in it."""
    return _USER_PASSWORD.sub(r"\1:***@", _QUERY_PASSWORD.sub(r"\1***", text))


def _parsed(url: str) -> re.Match[str]:
    found = _URL.fullmatch(url)
    if found is None or not _has_readable_port(found["location"]):
        raise ConfigurationError(
            "redis.url must look like redis://host:6379/0, rediss://user@host:6379/0 or unix:///path/of.sock, got "
            f"{masked(url)!r}; percent-encode what is special in a user name or path"
        )
    if _QUERY_PASSWORD.search(url):
        raise ConfigurationError(f"redis.url must have no password in its query, got {masked(url)!r}; give it in {HOW_TO_GIVE}")
    return found


def _has_readable_port(location: str) -> bool:
    try:
        urlsplit(f"//{location}").port  # noqa: B018 - reading it is the check
    except ValueError:
        return False
    return True
