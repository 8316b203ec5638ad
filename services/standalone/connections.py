"""How commands reach the parts of a run that runs: HTTP to the hub and the agents, a client of Redis."""

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Final, Self

import httpx
import msgspec
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from shared import redis_address, redis_checks
from shared.decoding import UNDECODABLE
from shared.errors import HeadraceError

TIMEOUT_S: Final = 10.0


class UnreachableError(HeadraceError):
    """A part of the run does not answer."""


class RefusedError(HeadraceError):
    """A part of the run refused what it was asked; the message is its own sentence."""


class ServiceApi:
    """The REST API at one address, with JSON in both directions."""

    def __init__(self, address: str, *, timeout_s: float = TIMEOUT_S, access: Mapping[str, str] | None = None) -> None:
        """Args: access: headers that open it."""
        self.address = address
        self._client = httpx.Client(timeout=timeout_s, headers=access, trust_env=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._client.close()

    def get(self, path: str) -> Any:
        return self.request("GET", path)

    def request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The decoded answer; None if it is empty. Raises: UnreachableError; RefusedError with what the answer says is wrong."""
        url = self.address + path
        content = None if body is None else msgspec.json.encode(body)
        try:
            response = self._client.request(method, url, content=content, headers={"Content-Type": "application/json"})
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise UnreachableError(
                f"the run must answer at {url}: {str(error) or type(error).__name__}; start it with `headrace up`, or see its logs"
            ) from error
        if response.is_error:
            raise RefusedError(_sentence(response))
        try:
            return msgspec.json.decode(response.content) if response.content else None
        except UNDECODABLE as error:
            raise UnreachableError(
                f"{url} must answer with JSON, and does not ({error}); something else listens there, so correct the address"
            ) from error


def redis_client(url: str) -> redis.Redis:
    """A client with the password of the environment, which leaves repetition to its caller. Raises: ConfigurationError."""
    return redis.Redis.from_url(
        redis_address.connection_url(url),
        protocol=redis_address.PROTOCOL,
        socket_timeout=TIMEOUT_S,
        socket_connect_timeout=TIMEOUT_S,
        retry=Retry(NoBackoff(), 0),
    )


def redis_failure(url: str, error: redis.RedisError) -> HeadraceError:
    """A failure of Redis as the sentence to show: it refuses us, or is away."""
    shown, reason = redis_address.masked(url), redis_checks.reason(error)
    return redis_checks.refusal(url, error) or UnreachableError(
        f"Redis must answer at {shown}, and does not ({reason}); start it, or correct redis.url"
    )


def _sentence(response: httpx.Response) -> str:
    try:
        return str(msgspec.json.decode(response.content)["detail"])
    except (*UNDECODABLE, KeyError, TypeError):
        return f"{response.request.method} {response.request.url} was answered with status {response.status_code}"
