"""Connections to Redis that outlast its restart."""

import redis
from redis.backoff import ExponentialWithJitterBackoff, NoBackoff
from redis.retry import Retry

from shared.errors import ConfigurationError

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
        url, retry=retry, socket_connect_timeout=CONNECT_TIMEOUT_S, socket_timeout=REPLY_TIMEOUT_S, health_check_interval=30
    )


def require(url: str) -> None:
    """Raises: ConfigurationError if no Redis answers at `url` within a few seconds."""
    with _client(url, Retry(ExponentialWithJitterBackoff(cap=1.0, base=0.1), 5)) as client:
        try:
            client.ping()
        except (redis.ConnectionError, redis.TimeoutError) as error:
            raise ConfigurationError(f"redis.url must be the address of a Redis that runs, got {url!r}: {error}") from error
