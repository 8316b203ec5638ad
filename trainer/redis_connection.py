"""Connections to Redis that outlast its restart."""

import redis
from redis.backoff import ExponentialWithJitterBackoff, NoBackoff
from redis.retry import Retry

from shared.configuration import RedisSection
from shared.redis_address import PROTOCOL, connection_url
from shared.redis_checks import require_usable

CONNECT_TIMEOUT_S = 5.0
REPLY_TIMEOUT_S = 30.0
MAX_RETRIES = 30
MAX_BACKOFF_S = 5.0


def patient_client(url: str) -> redis.Redis:
    """Repeats a command for about two minutes while Redis is away. For commands that may run twice."""
    return _client(url, Retry(ExponentialWithJitterBackoff(cap=MAX_BACKOFF_S, base=0.1), MAX_RETRIES))


def impatient_client(url: str) -> redis.Redis:
    """Raises redis.ConnectionError at once. For reads from a stream, which must not run twice unnoticed."""
    return _client(url, Retry(NoBackoff(), 0))


def _client(url: str, retry: Retry) -> redis.Redis:
    return redis.Redis.from_url(
        connection_url(url),
        protocol=PROTOCOL,
        retry=retry,
        socket_connect_timeout=CONNECT_TIMEOUT_S,
        socket_timeout=REPLY_TIMEOUT_S,
        health_check_interval=30,
    )


def require(section: RedisSection) -> None:
    """Raises: ConfigurationError if no Redis that a run can use answers within a few seconds."""
    with _client(section.url, Retry(ExponentialWithJitterBackoff(cap=1.0, base=0.1), 5)) as client:
        require_usable(client, section)
