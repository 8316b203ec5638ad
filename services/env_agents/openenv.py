"""Environments on an OpenEnv server: one WebSocket connection is one environment, for one episode.

Written against openenv-core 0.3.0. A server that is full or restarting is waited for; a connection is opened for each episode and
closed with it, so that neither dead sockets nor places on the server are kept (OpenEnv #1103, #1000).
"""

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit, urlunsplit

import aiohttp
import msgspec

from services.env_agents.bounded_answers import read_bounded
from services.env_agents.environment import Action, Environment, Message, RequestedCall, Step, Task
from services.env_agents.tools import ToolError, as_text
from shared.decoding import UNDECODABLE
from shared.errors import ConfigurationError, EpisodeError
from shared.trajectory import ToolCall

_PING_INTERVAL_S = 20.0
_CONNECT_TIMEOUT_S = 10.0
_CLOSE_TIMEOUT_S = 2.0
_FIRST_WAIT_S = 0.1
_LONGEST_WAIT_S = 2.0
_MAX_MESSAGE_BYTES = 4 * 2**20
"""Of one observation. What the policy reads is bounded by limits.max_tokens in any case."""
_MAX_SCHEMA_BYTES = 2**20
_MAX_TOOLS = 256
_HTTP_OF_SCHEME: Mapping[str, str] = {"ws": "http", "wss": "https"}


class UnreachableEnvironmentError(ConfigurationError):
    """No OpenEnv server answers at the URL of an environment."""


class _ConnectionLostError(EpisodeError, ConnectionError):
    """The connection is gone, and the environment's state with it."""


class _RefusalError(EpisodeError):
    """The server answered a message with an error."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"the environment server answered {code}: {message}")
        self.code = code
        self.reason = message


class _Reply(msgspec.Struct):
    type: str
    data: dict[str, Any]


class _Observation(msgspec.Struct):
    observation: dict[str, Any]
    reward: float | None = None
    done: bool = False


class _Tool(msgspec.Struct):
    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None


_Tools = Annotated[list[_Tool], msgspec.Meta(max_length=_MAX_TOOLS)]


class _ActionSchema(msgspec.Struct):
    properties: dict[str, dict[str, Any]] = {}
    required: list[str] = []

    @property
    def takes_tool_calls(self) -> bool:
        """Whether the server's actions are list_tools and call_tool: its own type of them, or the bare base of all actions."""
        return "tool_name" in self.properties or set(self.properties) <= {"metadata"}


class _Schemas(msgspec.Struct):
    action: _ActionSchema


class OpenEnvServer:
    """One OpenEnv server: what its actions look like, and how to connect. Makes an environment for each episode."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, reset_data: Mapping[str, Any], action_schema: _ActionSchema
    ) -> None:
        self._session = session
        self._socket_url = _socket_url(url)
        self.reset_data = reset_data
        self.action_schema = action_schema

    @classmethod
    async def find(cls, session: aiohttp.ClientSession, url: str, reset_data: Mapping[str, Any]) -> "OpenEnvServer":
        """The server at `url` (its root or its `/ws`, by http or ws).

        Raises: UnreachableEnvironmentError unless it answers with its schemas.
        """
        timeout = aiohttp.ClientTimeout(total=_CONNECT_TIMEOUT_S)
        try:
            async with session.get(f"{_root_url(url)}/schema", timeout=timeout, raise_for_status=True) as response:
                schemas = msgspec.json.decode(await read_bounded(response, _MAX_SCHEMA_BYTES), type=_Schemas)
        except (TimeoutError, aiohttp.ClientError, EpisodeError, *UNDECODABLE) as error:
            reason = str(error) or type(error).__name__
            raise UnreachableEnvironmentError(
                f"an OpenEnv server must answer at {url}, but GET /schema failed: {reason}; start it, or correct the "
                "environment's url"
            ) from error
        return cls(session, url, reset_data, schemas.action)

    def create_environment(self) -> "OpenEnvEnvironment":
        return OpenEnvEnvironment(self)

    async def connect(self) -> aiohttp.ClientWebSocketResponse:
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            return await self._session.ws_connect(self._socket_url, heartbeat=_PING_INTERVAL_S, max_msg_size=_MAX_MESSAGE_BYTES)


class OpenEnvEnvironment(Environment):
    """One place on an OpenEnv server, from `open` to `close`.

    Where the server has tools the policy calls them, and text without a call ends the episode. Elsewhere the policy's text is the
    action: the value of the action's one required field, or a JSON object of its fields.
    """

    def __init__(self, server: OpenEnvServer) -> None:
        self._server = server
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._tool_specs: list[Mapping[str, Any]] = []

    async def open(self) -> None:
        wait_s = _FIRST_WAIT_S
        while not await self._take_place():
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    async def reset(self, task: Task) -> list[Message]:
        data = {**self._server.reset_data, **task.data, "seed": task.seed}
        try:
            first = await self._observe("reset", data)
        except _ConnectionLostError:
            await self.open()
            first = await self._observe("reset", data)
        if self._server.action_schema.takes_tool_calls:
            self._tool_specs = await self._list_tools()
        return [{"role": "user", "content": _described(first.observation)}]

    async def step(self, action: Action) -> Step:
        if self._tool_specs:
            return await self._call_tools(action.tool_calls) if action.tool_calls else Step(done=True)
        try:
            answer = await self._observe("step", _fields_of(action.text, self._server.action_schema))
        except ValueError as error:
            return Step(messages=[{"role": "user", "content": f"error: {error}"}])
        except _RefusalError as error:
            if error.code != "VALIDATION_ERROR":
                raise
            return Step(messages=[{"role": "user", "content": f"error: {error.reason}"}])
        message: Message = {"role": "user", "content": _described(answer.observation)}
        return Step(messages=[message], reward=answer.reward or 0.0, done=answer.done)

    async def close(self) -> None:
        socket, self._socket = self._socket, None
        if socket is None:
            return
        async with asyncio.timeout(_CLOSE_TIMEOUT_S):
            with contextlib.suppress(aiohttp.ClientError, ConnectionError):
                await socket.send_json({"type": "close"})
            await socket.close()

    def tool_specs(self) -> list[Mapping[str, Any]]:
        return self._tool_specs

    async def _take_place(self) -> bool:
        """Connects anew; False if the server is full or away. A full server says so at the first message."""
        await self.close()
        try:
            self._socket = await self._server.connect()
            await self._ask({"type": "state"})
        except _RefusalError as error:
            if error.code == "CAPACITY_REACHED":
                await self.close()
                return False
            if error.code == "EXECUTION_ERROR":  # An environment without a state to show has a place all the same.
                return True
            raise
        except (TimeoutError, aiohttp.ClientError, _ConnectionLostError):
            return False
        return True

    async def _call_tools(self, calls: tuple[RequestedCall, ...]) -> Step:
        loop = asyncio.get_running_loop()
        messages: list[Message] = []
        records: list[ToolCall] = []
        reward, is_done = 0.0, False
        for call in calls:
            started = loop.time()
            try:
                answer = await self._call_remote_tool(call)
                text, is_error = _tool_text(answer.observation), False
                reward, is_done = reward + (answer.reward or 0.0), answer.done
            except ToolError as error:
                text, is_error = f"error: {error}", True
            messages.append({"role": "tool", "name": call.name, "content": text})
            records.append(ToolCall(call.name, msgspec.json.encode(call.arguments).decode(), loop.time() - started, is_error))
            if is_done:
                break
        return Step(messages=messages, reward=reward, done=is_done, tool_calls=tuple(records))

    async def _call_remote_tool(self, call: RequestedCall) -> _Observation:
        if call.problem:
            raise ToolError(call.problem)
        answer = await self._observe("step", {"type": "call_tool", "tool_name": call.name, "arguments": call.arguments})
        if error := answer.observation.get("error"):
            told = error if isinstance(error, Mapping) else {"message": error}
            raise ToolError(as_text(told.get("message") or told.get("error_type") or "the tool failed"))
        return answer

    async def _list_tools(self) -> list[Mapping[str, Any]]:
        answer = await self._observe("step", {"type": "list_tools"})
        try:
            tools = msgspec.convert(answer.observation.get("tools", []), _Tools)
        except msgspec.ValidationError as error:
            raise EpisodeError(
                f"the environment server answered list_tools with something that is no list of tools: {error}"
            ) from error
        return [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description or "",
                    "parameters": tool.input_schema or {"type": "object", "properties": {}},
                },
            }
            for tool in tools
        ]

    async def _observe(self, kind: Literal["reset", "step"], data: Mapping[str, Any]) -> _Observation:
        reply = await self._ask({"type": kind, "data": data})
        try:
            return msgspec.convert(reply.data, _Observation, strict=False)
        except msgspec.ValidationError as error:
            raise EpisodeError(f"the environment server answered {kind} with something that is no observation: {error}") from error

    async def _ask(self, message: Mapping[str, Any]) -> _Reply:
        """One message and its reply. Deadlines are the caller's: the episode's for `open`, the step's or the reset's after it."""
        if self._socket is None:
            raise _ConnectionLostError("the connection to the environment server is not open")
        # A full server closes right after it said so, and what it said can still be read.
        with contextlib.suppress(aiohttp.ClientError, ConnectionError):
            await self._socket.send_json(message)
        received = await self._socket.receive()
        if isinstance(received.data, aiohttp.WebSocketError) and received.data.code == aiohttp.WSCloseCode.MESSAGE_TOO_BIG:
            raise EpisodeError(
                f"an answer of an environment server must have at most {_MAX_MESSAGE_BYTES} bytes, got more; shorten it"
            )
        if received.type is not aiohttp.WSMsgType.TEXT:
            raise _ConnectionLostError("the environment server closed the connection in the middle of an episode")
        try:
            reply = msgspec.json.decode(received.data, type=_Reply)
        except UNDECODABLE as error:
            raise EpisodeError(f"the environment server does not speak OpenEnv's protocol: {error}") from error
        if reply.type == "error":
            raise _RefusalError(str(reply.data.get("code")), str(reply.data.get("message")))
        return reply


def _root_url(url: str) -> str:
    parts = urlsplit(url)
    path = parts.path.removesuffix("/").removesuffix("/ws")
    return urlunsplit((_HTTP_OF_SCHEME.get(parts.scheme, parts.scheme), parts.netloc, path, "", ""))


def _socket_url(url: str) -> str:
    return f"ws{_root_url(url).removeprefix('http')}/ws"


def _described(observation: Mapping[str, Any]) -> str:
    """How an observation reads: the text of its only field, or its fields as JSON."""
    fields = {name: value for name, value in observation.items() if value is not None}
    if len(fields) == 1:
        (only,) = fields.values()
        return as_text(only)
    return as_text(fields)


def _fields_of(text: str, schema: _ActionSchema) -> dict[str, Any]:
    """The action that a text means. Raises: ValueError, with what the policy should read."""
    if len(schema.required) == 1:
        (name,) = schema.required
        return {name: _value_of(text.strip(), schema.properties.get(name, {}))}
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except UNDECODABLE as error:
        raise ValueError(f"an action must be a JSON object with {', '.join(schema.properties)}") from error


def _value_of(text: str, field: Mapping[str, Any]) -> Any:
    if field.get("type") == "string":
        return text
    try:
        return msgspec.json.decode(text)
    except UNDECODABLE as error:
        raise ValueError(f"an action must be of type {field.get('type', 'JSON')}") from error


def _tool_text(observation: Mapping[str, Any]) -> str:
    """A tool's result: what MCP results say in `content`, or the value itself."""
    result = observation.get("result")
    if isinstance(result, dict) and isinstance(result.get("content"), list):
        return "\n".join(str(part.get("text", "")) for part in result["content"] if isinstance(part, dict))
    return as_text(result)
