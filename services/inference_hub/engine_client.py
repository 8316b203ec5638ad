"""SGLang's HTTP API of one engine (0.5.23): generate, abort, what it is, and the control calls of a weight update."""

import re
from collections.abc import Mapping
from typing import Any, Final, TypeVar

import aiohttp
import msgspec
from yarl import URL

from services.inference_hub.engine_connection import (
    CONNECT_TIMEOUT_S,
    KEEPALIVE_S,
    OUT_OF_FILES,
    ConnectError,
    EngineConnections,
    LostConnectionError,
    StaleConnectionError,
)
from services.inference_hub.limits import EngineLoad
from shared.decoding import UNDECODABLE
from shared.errors import EngineError
from shared.versions import version_of_label

MAX_STALE_CONNECTIONS: Final = 2
ABORT_TIMEOUT_S: Final = 5.0

StructT = TypeVar("StructT", bound=msgspec.Struct)

BEYOND_VOCABULARY: Final = msgspec.json.encode(
    {"input_ids": [0], "sampling_params": {"max_new_tokens": 1}, "return_logprob": True, "token_ids_logprob": [2**31 - 1]}
)
VALID_RANGE: Final = re.compile(r"valid range is \[0, (\d+)\)")
JSON_HEADERS: Final = {"Content-Type": "application/json"}


class EngineUnreachableError(EngineError):
    """Nobody listens at the engine's address: the call was not received."""


class EngineTimeoutError(EngineError):
    """It did not answer a control call in time: its scheduler is busy, or hangs."""


class EngineRefusedError(EngineError):
    """It answered a control call with a refusal, in its own words."""


class ModelInfo(msgspec.Struct, frozen=True):
    """`GET /model_info`: answered by SGLang's HTTP process, so also while generation is paused."""

    weight_version: str = "default"
    model_type: str | None = None
    """Of the model's config.json, such as qwen3."""

    @property
    def version(self) -> int | None:
        """The policy version of the label; None if the label is not a version."""
        return version_of_label(self.weight_version)


class SchedulerState(msgspec.Struct, frozen=True):
    effective_max_running_requests_per_dp: int | None = None


class ServerInfo(msgspec.Struct, frozen=True):
    """`GET /server_info`: asks the scheduler, so it waits while one is busy."""

    version: str
    model_path: str = ""
    tp_size: int = 1
    dp_size: int = 1
    disable_overlap_schedule: bool = False
    internal_states: tuple[SchedulerState, ...] = ()
    max_total_num_tokens: int | None = None
    """Of its KV cache."""
    max_req_input_len: int | None = None
    """Tokens of the longest prompt that context and KV cache have room for."""

    @property
    def max_running_calls(self) -> int | None:
        """Requests that it samples for at the same time; None if it does not say."""
        return self.internal_states[0].effective_max_running_requests_per_dp if self.internal_states else None


class _Model(msgspec.Struct, frozen=True):
    max_model_len: int | None = None


class _Models(msgspec.Struct, frozen=True):
    """`GET /v1/models`: the one that it serves, and adapters."""

    data: list[_Model] = []


class _Loads(msgspec.Struct, frozen=True):
    """`GET /v1/loads`: one for each scheduler, which is one."""

    loads: list[EngineLoad] = []


class EngineClient:
    """Opened on first use; `close` cuts every call in flight, and the next use opens it again."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._base = URL(url)
        self._connections = EngineConnections(url)
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        self._connections.close()
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def close_old(self) -> None:
        """Connections that generate calls left and will not use again."""
        self._connections.close_old()

    async def generate(self, body: bytes) -> tuple[int, bytes]:
        """Status and body of `POST /generate`. The caller sets the deadline: an answer takes as long as it takes.

        Raises: EngineUnreachableError if it was not received, EngineError if the connection was lost before the answer.
        """
        for _ in range(MAX_STALE_CONNECTIONS):
            try:
                return await self._connections.generate(body)
            except StaleConnectionError:
                # The engine closes connections that were idle for a while, just as this call took one of them.
                self._connections.close_idle()
            except ConnectError as error:
                raise EngineUnreachableError(f"engine {self.url} must be reachable, got: {error}") from error
            except LostConnectionError as error:
                raise EngineError(f"engine {self.url} lost the connection before it answered: {error}") from error
        raise EngineError(f"engine {self.url} must not close connections as soon as they are used, and did so twice")

    async def abort(self, rid: str) -> None:
        """Stops the request `rid`. Raises: EngineError."""
        await self.post("abort_request", {"rid": rid}, timeout_s=ABORT_TIMEOUT_S)

    async def model_info(self, *, timeout_s: float) -> ModelInfo:
        return await self._get("model_info", ModelInfo, timeout_s)

    async def server_info(self, *, timeout_s: float) -> ServerInfo:
        return await self._get("server_info", ServerInfo, timeout_s)

    async def context_tokens(self, *, timeout_s: float) -> int | None:
        """The model's context length; None of an engine that does not say. Raises: EngineError."""
        models = (await self._get("v1/models", _Models, timeout_s)).data
        return models[0].max_model_len if models else None

    async def vocabulary(self, *, timeout_s: float) -> int | None:
        """Number of its model's token ids; None if it does not say. Raises: EngineError.

        SGLang says it only where it refuses to report the log-probability of a token beyond, before anything runs.
        """
        status, body = await self._request("POST", "generate", BEYOND_VOCABULARY, timeout_s)
        said = VALID_RANGE.search(_message(body)) if status == 400 else None
        return int(said[1]) if said else None

    async def load(self, *, timeout_s: float) -> EngineLoad:
        """What its scheduler runs and queues; nothing known of an engine that does not say. Raises: EngineError."""
        loads = (await self._get("v1/loads", _Loads, timeout_s)).loads
        return loads[0] if loads else EngineLoad()

    async def is_ready(self, *, timeout_s: float) -> bool:
        """False while it starts or is paused."""
        status, _ = await self._request("GET", "ready", None, timeout_s)
        return status == 200

    async def post(self, path: str, payload: Mapping[str, Any], *, timeout_s: float) -> bytes:
        """A control call; the answer's body. Raises: EngineRefusedError with the engine's own words, EngineError."""
        status, body = await self._request("POST", path, msgspec.json.encode(payload), timeout_s)
        if status != 200:
            raise EngineRefusedError(f"engine {self.url} must accept /{path}, answered {status}: {_message(body)}")
        return body

    async def _get(self, path: str, struct: type[StructT], timeout_s: float) -> StructT:
        status, body = await self._request("GET", path, None, timeout_s)
        if status != 200:
            raise EngineError(f"engine {self.url} must answer /{path}, answered {status}: {_message(body)}")
        try:
            return msgspec.json.decode(body, type=struct)
        except UNDECODABLE as error:
            raise EngineError(f"{self.url} must be an SGLang engine, answered /{path} with something else: {error}") from error

    async def _request(self, method: str, path: str, data: bytes | None, timeout_s: float) -> tuple[int, bytes]:
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S)
        try:
            async with self._opened().request(
                method, self._base / path, data=data, headers=JSON_HEADERS, timeout=timeout
            ) as response:
                return response.status, await response.read()
        except aiohttp.ClientConnectorError as error:
            if error.errno in OUT_OF_FILES:
                raise EngineError(
                    f"the hub has no file descriptor left to ask engine {self.url} for /{path}; raise ulimit -n"
                ) from error
            raise EngineUnreachableError(
                f"engine {self.url} must be reachable, got: {error}; start it, or check the address"
            ) from error
        except TimeoutError as error:
            raise EngineTimeoutError(f"engine {self.url} must answer /{path} within {timeout_s:g} s, and did not") from error
        except aiohttp.ClientError as error:
            raise EngineError(f"engine {self.url} lost the connection during /{path}: {_describe(error)}") from error

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(keepalive_timeout=KEEPALIVE_S),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session


def _describe(error: Exception) -> str:
    return f"{type(error).__name__} {error}".strip()


def _message(body: bytes) -> str:
    """The sentence in an engine's error, whichever of its shapes it has."""
    try:
        content = msgspec.json.decode(body)
    except UNDECODABLE:
        return body[:500].decode(errors="replace")
    if isinstance(content, dict):
        for key in ("message", "detail", "error"):
            if key in content:
                return str(content[key])
    return str(content)[:500]
