"""Environments and rewards on servers that answer garbage, slowly, without end or never: an error in time, and no more memory."""

import asyncio
import gzip
import json
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from examples.calculator import Calculator
from services.env_agents import openenv
from services.env_agents.environment import Action, Environment, RequestedCall, Step, Task
from services.env_agents.openenv import OpenEnvServer, UnreachableEnvironmentError
from services.env_agents.reward_sources import HttpSource
from services.env_agents.rewards import DeclaredReward, FinishedEpisode
from shared import trajectory as trajectories
from shared.environment_spec import HttpReward, RewardRetries
from shared.errors import EpisodeError
from shared.trajectory import Outcome

TASK = Task("5", 5, {})
SUM = Task("5", 5, {"question": "6 * 7?", "answer": "42"})
EPISODE = FinishedEpisode(TASK, [{"role": "user", "content": "6 * 7?"}], "42")
NO_RETRIES = RewardRetries(timeout=0, unreachable=0, error=0, unusable=0)
DEADLINE_S = 20.0
"""Of a test: what hangs would pass it."""
NUM_ANSWERS = 60
BOMB = gzip.compress(b" " * 2**28)


def http_answer(body: bytes, *headers: str, length: int | None = None) -> bytes:
    """Of a server that says that it closes the connection: otherwise the next request would fail at that, unread."""
    size = f"Content-Length: {len(body) if length is None else length}"
    lines = ["HTTP/1.1 200 OK", "Connection: close", size, *headers, "", ""]
    return "\r\n".join(lines).encode() + body


ANSWERS = {
    "nothing": b"",
    "not HTTP": b"\x00\xff garbage" * 50,
    "a status that is none": b"HTTP/1.1 abc def\r\n\r\n",
    "headers without end": b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 100_000,
    "a header without end": b"HTTP/1.1 200 OK\r\nA: " + b"b" * 2**22,
    "less than promised": http_answer(b"{}", length=1000),
    "a length that is none": b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n{}",
    "a chunk that is none": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n{}\r\n0\r\n\r\n",
    "not JSON": http_answer(b"<html>"),
    "nested JSON": http_answer(b"[" * 500_000),
    "another type": http_answer(b'{"action": [], "reward": {}}'),
    "a number too large": http_answer(b'{"reward": 1e999}'),
    "an integer of many digits": http_answer(b'{"reward": ' + b"9" * 10_000 + b"}"),
    "half a surrogate": http_answer(b'{"reward": "\\ud800"}'),
    "not UTF-8": http_answer(b'{"reward": "\xff"}'),
    "too many parts": http_answer(json.dumps({"reward": 1, "parts": {str(n): 1 for n in range(1_000)}}).encode()),
    "a compressed 256 MB": http_answer(BOMB, "Content-Encoding: gzip"),
    "not compressed": http_answer(b"{}", "Content-Encoding: gzip"),
    "a redirect": b"HTTP/1.1 302 Found\r\nLocation: http://169.254.169.254/\r\nContent-Length: 0\r\n\r\n",
    "a redirect to itself": b"HTTP/1.1 307 Found\r\nLocation: /\r\nContent-Length: 0\r\n\r\n",
    "an error": b"HTTP/1.1 500 Oh\r\nContent-Length: 2\r\n\r\nno",
}


@asynccontextmanager
async def answering(answer: bytes, *, endless: bytes = b"", is_silent: bool = False):
    """A server on a raw socket: answers every connection so, whatever it is asked, and then closes it, goes on, or falls silent."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.read(2**16)
            writer.write(answer)
            await writer.drain()
            while endless:
                writer.write(endless)
                await writer.drain()
            if is_silent:
                await reader.read()
        except ConnectionError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def require_errors(http_session, address: str, *, timeout_s: float = 1.0, because: str = "") -> None:
    """An environment cannot be found there, and a reward fails, in time and in words, `because` among them."""
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(UnreachableEnvironmentError, match=rf"{because}.*start it, or correct the environment's url"):
            await OpenEnvServer.find(http_session, f"ws://{address}", {})
        spec = HttpReward(url=f"http://{address}/score", timeout_s=timeout_s, retries=NO_RETRIES)
        with pytest.raises(EpisodeError, match=rf"the reward 'reward' failed.*{because}"):
            await DeclaredReward(spec, HttpSource(http_session, spec)).score(EPISODE)


def is_json(body: bytes) -> bool:
    try:
        json.loads(body)
    except ValueError:
        return False
    return True


@pytest.fixture
def hurried(monkeypatch):
    monkeypatch.setattr(openenv, "_CONNECT_TIMEOUT_S", 1.0)


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
async def test_an_answer_that_is_none_is_an_error_in_words(http_session, answer):
    async with answering(answer) as address:
        await require_errors(http_session, address)


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\n", http_answer(b'{"action":', length=100)])
async def test_an_answer_that_never_ends_coming_is_given_up(http_session, answer):
    async with answering(answer, is_silent=True) as address:
        await require_errors(http_session, address)


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize(
    ("answer", "endless"),
    [
        (b"HTTP/1.1 200 OK\r\n", b"X: y\r\n" * 1000),
        (b"HTTP/1.1 102 Processing\r\n\r\n", b"HTTP/1.1 102 Processing\r\n\r\n" * 100),
    ],
    ids=["headers", "interim answers"],
)
async def test_a_head_without_end_is_cut(http_session, answer, endless):
    async with answering(answer, endless=endless) as address:
        await require_errors(http_session, address)


@pytest.mark.parametrize(
    ("answer", "endless"),
    [
        (http_answer(b"[", length=2**40), b"1," * 2**15),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"10000\r\n" + b" " * 2**16 + b"\r\n"),
        (http_answer(BOMB, "Content-Encoding: gzip"), b""),
    ],
    ids=["a body", "chunks", "compressed"],
)
async def test_a_body_without_end_is_cut_at_its_bound(http_session, answer, endless):
    async with answering(answer, endless=endless) as address:
        await require_errors(http_session, address, timeout_s=DEADLINE_S, because=r"at most \d+ bytes, got more")


@settings(max_examples=NUM_ANSWERS, suppress_health_check=list(HealthCheck))
@given(st.binary(max_size=300), st.booleans())
def test_any_bytes_are_an_error_in_words(body, is_http):
    assume(not is_json(body))  # Some of it would be a reward.

    async def ask() -> None:
        async with aiohttp.ClientSession() as session, answering(http_answer(body) if is_http else body) as address:
            await require_errors(session, address)

    asyncio.run(ask())


@asynccontextmanager
async def environment_server(reply):
    """An OpenEnv server whose answer on the socket is what `reply(socket, message)` sends."""

    async def schema(_: web.Request) -> web.Response:
        return web.json_response({"action": {"properties": {}}})

    async def socket(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(max_msg_size=2**22)
        await socket.prepare(request)
        async for message in socket:
            kind = json.loads(message.data)["type"]
            if kind == "state":
                await socket.send_json({"type": "state", "data": {}})
            elif kind == "close":
                break
            else:
                await reply(socket, json.loads(message.data))
        return socket

    app = web.Application()
    app.router.add_get("/schema", schema)
    app.router.add_get("/ws", socket)
    async with TestServer(app) as server:
        yield f"ws://127.0.0.1:{server.port}"


async def outcome(http_session, agent, make_spec, identity, reply) -> tuple[Outcome, str]:
    spec = make_spec(open_timeout_s=2.0, reset_timeout_s=0.5, step_timeout_s=0.5, max_tokens=100_000)
    async with asyncio.timeout(DEADLINE_S), environment_server(reply) as url:
        server = await OpenEnvServer.find(http_session, url, {})
        record = await agent.run(server.create_environment, spec, TASK, identity)
    assert trajectories.decode(trajectories.encode(record)) == record
    return record.outcome, record.detail


def observation(**data):
    return {"type": "observation", "data": {"observation": data, "reward": None, "done": False}}


async def never(socket, message):
    return


async def too_large(socket, message):
    await socket.send_str(" " * 2**23)


async def bytes_instead(socket, message):
    await socket.send_bytes(b"{}")


async def nested(socket, message):
    await socket.send_str('{"type": "observation", "data": ' + "[" * 200_000)


async def hang_up(socket, message):
    await socket.close()


async def tools_that_are_none(socket, message):
    await socket.send_json(observation(tools=[{"description": 3}]))


async def many_tools(socket, message):
    await socket.send_json(observation(tools=[{"name": f"t{number}"} for number in range(1_000)]))


async def null(socket, message):
    await socket.send_str("null")


@pytest.mark.parametrize(
    ("reply", "expected", "words"),
    [
        (never, Outcome.TIMEOUT, "reset"),
        (too_large, Outcome.ENVIRONMENT_ERROR, "must have at most 4194304 bytes"),
        (bytes_instead, Outcome.ENVIRONMENT_ERROR, "closed the connection"),
        (nested, Outcome.ENVIRONMENT_ERROR, "does not speak OpenEnv's protocol"),
        (hang_up, Outcome.ENVIRONMENT_ERROR, "closed the connection"),
        (tools_that_are_none, Outcome.ENVIRONMENT_ERROR, "no list of tools"),
        (many_tools, Outcome.ENVIRONMENT_ERROR, "no list of tools"),
        (null, Outcome.ENVIRONMENT_ERROR, "does not speak OpenEnv's protocol"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
async def test_an_environment_that_answers_nonsense_is_an_outcome(
    http_session, agent, hub, make_spec, identity, reply, expected, words
):
    found, detail = await outcome(http_session, agent, make_spec, identity, reply)
    assert (found, words in detail) == (expected, True), detail


async def test_a_remote_tool_is_called_with_10_mb_of_arguments_and_the_episode_is_a_record(
    http_session, agent, hub, make_spec, identity
):
    """The server takes no message of that size and closes the connection."""

    async def answer(socket, message):
        is_listing = message["type"] == "reset" or message["data"].get("type") == "list_tools"
        await socket.send_json(observation(tools=[{"name": "echo"}]) if is_listing else observation(result="heard"))

    async with asyncio.timeout(DEADLINE_S), environment_server(answer) as url:
        environment = (await OpenEnvServer.find(http_session, url, {})).create_environment()
        await environment.open()
        await environment.reset(TASK)
        assert (await environment.step(Action("", (RequestedCall("echo", {"text": "x"}),)))).messages[0]["content"] == "heard"
        with pytest.raises(EpisodeError, match="closed the connection"):
            await environment.step(Action("", (RequestedCall("echo", {"text": "x" * 10_000_000}),)))
        await environment.close()


@pytest.mark.parametrize(
    "arguments",
    [
        {"expression": "1" * 10_000_000},
        {"expression": "(" * 10_000_000},
        {"x" * 10_000_000: 1},
        {"expression": [1] * 1_000_000},
        {},
    ],
    ids=["digits", "brackets", "a name", "a list", "none"],
)
async def test_a_tool_of_ours_is_told_of_10_mb_of_arguments(arguments):
    async with asyncio.timeout(DEADLINE_S):
        environment = Calculator()
        await environment.reset(SUM)
        step = await environment.step(Action("", (RequestedCall("calculate", arguments),)))
    [message] = step.messages
    assert 0 < len(message["content"]) < 1_000
    assert not step.done


def nested_call(depth: int) -> str:
    return (
        '<tool_call>\n{"name": "calculate", "arguments": {"expression": ' + "[" * depth + "]" * depth + "}}\n</tool_call><|im_end|>"
    )


async def test_a_tool_call_nested_deeper_than_the_interpreter_goes_is_an_outcome(agent, hub, make_spec, identity):
    hub.policy = lambda _: nested_call(20_000)
    record = await agent.run(Calculator, make_spec(max_tokens=200_000), SUM, identity)
    assert record.outcome in (Outcome.COMPLETED, Outcome.TRUNCATED), record.detail


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=NUM_ANSWERS, suppress_health_check=list(HealthCheck))
@given(said=anything, stepped=st.builds(Step, messages=anything, reward=anything, done=anything, reward_parts=anything) | anything)
async def test_whatever_an_environment_answers_is_an_outcome(agent, hub, make_spec, identity, said, stepped):
    class Garbage(Environment):
        async def reset(self, task):
            return said or [{"role": "user", "content": "?"}]

        async def step(self, action):
            return stepped

    record = await agent.run(Garbage, make_spec(max_turns=2), TASK, identity)
    assert trajectories.decode(trajectories.encode(record)).outcome in Outcome
