"""Against OpenEnv's own server in another process; a fake server only for what that one cannot be made to do."""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from services.env_agents.environment import Action, RequestedCall, Task
from services.env_agents.openenv import OpenEnvServer
from shared.errors import EpisodeError

TASK = Task("5", 5, {})


@contextlib.contextmanager
def serving(*command: str):
    """A server process on a free port; yields its URL once it answers."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([sys.executable, *(part.format(port=port) for part in command)], env=environment) as process:
        try:
            for _ in range(1200):
                with contextlib.suppress(urllib.error.URLError, ConnectionError):
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1).close()
                    break
                assert process.poll() is None, "the server must start"
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.1)
            yield f"ws://127.0.0.1:{port}"
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def guessing_url():
    with serving("-m", "examples.openenv_guess", "--port", "{port}", "--places", "1") as url:
        yield url


@pytest.fixture(scope="module")
def shop_url():
    with serving(str(Path(__file__).parent / "openenv_tool_server.py"), "{port}") as url:
        yield url


@pytest.fixture
async def guessing(http_session, guessing_url):
    return await OpenEnvServer.find(http_session, guessing_url, {"highest": 4})


async def test_text_is_the_action_and_arguments_are_reset_data(guessing):
    environment = guessing.create_environment()
    await environment.open()
    assert await environment.reset(TASK) == [{"role": "user", "content": "guess a number from 1 to 4"}]
    assert environment.tool_specs() == []
    steps = [await environment.step(Action(str(number))) for number in range(1, 5)]
    await environment.close()
    right = next(step for step in steps if step.done)
    assert (right.messages[0]["content"], right.reward) == ("right", 1.0)
    assert steps[0].done or steps[0].messages[0]["content"] == "higher"


@pytest.mark.parametrize("text", ["seven", "[1]", '"3.5"', ""])
async def test_text_that_is_no_action_is_told_to_the_policy(guessing, text):
    environment = guessing.create_environment()
    await environment.open()
    await environment.reset(TASK)
    step = await environment.step(Action(text))
    await environment.close()
    assert step.messages[0]["content"].startswith("error: ")
    assert not step.done


async def test_full_server_is_waited_for(guessing):
    first, second = guessing.create_environment(), guessing.create_environment()
    await first.open()
    waiting = asyncio.create_task(second.open())
    done, _ = await asyncio.wait([waiting], timeout=0.3)
    assert not done
    await first.close()
    async with asyncio.timeout(20):
        await waiting
        await second.reset(TASK)
    await second.close()


async def test_cancelled_episode_gives_its_place_back(guessing, agent, hub, make_spec, identity):
    asked = asyncio.Event()

    async def think(_):
        asked.set()
        await asyncio.sleep(0.05)
        return "1<|im_end|>"

    hub.policy = think
    episode = asyncio.create_task(agent.run(guessing.create_environment, make_spec(max_turns=10_000), TASK, identity))
    await asked.wait()
    episode.cancel()
    await asyncio.wait([episode])
    async with asyncio.timeout(20):
        following = guessing.create_environment()
        await following.open()
        await following.close()


async def test_whole_episode_plays_over_the_socket(guessing, agent, hub, make_spec, identity):
    guesses = iter("1234")
    hub.policy = lambda _: f"{next(guesses)}<|im_end|>"
    record = await agent.run(guessing.create_environment, make_spec(), TASK, identity)
    assert (record.outcome, record.reward) == ("completed", 1.0)


async def test_servers_tools_are_the_policys(http_session, shop_url):
    server = await OpenEnvServer.find(http_session, shop_url, {})
    environment = server.create_environment()
    await environment.open()
    assert await environment.reset(TASK) == [{"role": "user", "content": "the shop is open"}]
    (spec,) = environment.tool_specs()
    assert (spec["function"]["name"], spec["function"]["description"]) == ("buy", "Buys something.")
    assert set(spec["function"]["parameters"]["properties"]) == {"item", "count"}
    calls = (RequestedCall("buy", {"item": "tea"}), RequestedCall("sell", {}), RequestedCall("", {}, "the tool call is not JSON"))
    step = await environment.step(Action("", calls))
    assert step.messages[0] == {"role": "tool", "name": "buy", "content": "1 tea"}
    assert [call.is_error for call in step.tool_calls] == [False, True, True]
    step = await environment.step(Action("", (RequestedCall("buy", {"item": "tea", "count": 2}),)))
    await environment.close()
    assert (step.reward, step.done) == (1.0, True)


async def test_text_without_a_call_ends_an_episode_of_tools(http_session, shop_url):
    environment = (await OpenEnvServer.find(http_session, shop_url, {})).create_environment()
    await environment.open()
    await environment.reset(TASK)
    assert (await environment.step(Action("done"))).done
    await environment.close()


class FaultyServer:
    """Speaks the protocol as far as each test wants it to."""

    def __init__(self) -> None:
        self.num_connections = 0
        self.drop_on: list[str] = []
        self.replies = {
            "state": {"type": "state", "data": {}},
            "reset": {"type": "observation", "data": {"observation": {"text": "go"}, "reward": None, "done": False}},
            "step": {"type": "observation", "data": {"observation": {"text": "went"}, "reward": 0.5, "done": True}},
        }

    async def schema(self, _: web.Request) -> web.Response:
        return web.json_response({"action": {"properties": {"move": {"type": "string"}}, "required": ["move"]}})

    async def socket(self, request: web.Request) -> web.WebSocketResponse:
        self.num_connections += 1
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for message in socket:
            kind = json.loads(message.data)["type"]
            if kind in self.drop_on:
                self.drop_on.remove(kind)
                break
            if kind == "close":
                break
            await socket.send_json(self.replies[kind])
        return socket


@pytest.fixture
async def faulty(http_session):
    faulty = FaultyServer()
    app = web.Application()
    app.router.add_get("/schema", faulty.schema)
    app.router.add_get("/ws", faulty.socket)
    async with TestServer(app) as server:
        faulty.environment = (await OpenEnvServer.find(http_session, str(server.make_url("/ws")), {})).create_environment()
        yield faulty
        await faulty.environment.close()


async def test_socket_that_died_before_the_episode_is_reopened(faulty):
    faulty.drop_on = ["state", "reset"]
    await faulty.environment.open()
    assert (await faulty.environment.reset(TASK))[0]["content"] == "go"
    assert (await faulty.environment.step(Action("north"))).reward == 0.5
    assert faulty.num_connections == 3


async def test_socket_that_dies_in_the_middle_ends_the_episode(faulty):
    faulty.drop_on = ["step"]
    await faulty.environment.open()
    await faulty.environment.reset(TASK)
    with pytest.raises(EpisodeError, match="closed the connection in the middle"):
        await faulty.environment.step(Action("north"))


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ({"type": "error", "data": {"code": "EXECUTION_ERROR", "message": "boom"}}, "answered EXECUTION_ERROR: boom"),
        ({"type": "observation", "data": {"observation": 3}}, "no observation"),
        ({"data": {}}, "does not speak OpenEnv's protocol"),
    ],
)
async def test_server_that_breaks_or_answers_nonsense_ends_the_episode(faulty, reply, message):
    await faulty.environment.open()
    await faulty.environment.reset(TASK)
    faulty.replies["step"] = reply
    with pytest.raises(EpisodeError, match=message):
        await faulty.environment.step(Action("north"))


async def test_action_that_the_server_refuses_is_told_to_the_policy(faulty):
    await faulty.environment.open()
    await faulty.environment.reset(TASK)
    faulty.replies["step"] = {"type": "error", "data": {"code": "VALIDATION_ERROR", "message": "Invalid message"}}
    step = await faulty.environment.step(Action("north"))
    assert (step.messages[0]["content"], step.done) == ("error: Invalid message", False)
