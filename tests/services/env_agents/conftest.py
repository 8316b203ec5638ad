"""A small tokenizer with the real chat format, and a hub that is fake only where the transport begins."""

import asyncio
import functools
import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field

import aiohttp
import httpx
import pytest
import redis.asyncio
import renderers
from aiohttp import web
from aiohttp.test_utils import TestServer
from fastapi import FastAPI
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from services.env_agents.control import create_control
from services.env_agents.environment import Environment
from services.env_agents.episode import EnvironmentAgent
from services.env_agents.episode_log import EpisodeIdentity
from services.env_agents.episode_statistics import RunStatistics
from services.env_agents.evaluation import Evaluator
from services.env_agents.generation import GenerationClient
from services.env_agents.holds import held
from services.env_agents.loading import EnvironmentLoader
from services.env_agents.metrics import AgentMetrics
from services.env_agents.registry import EnvironmentRegistry
from services.env_agents.remote_hosts import RemoteHosts, remote_session
from services.env_agents.rendering import ChatRenderer
from services.env_agents.rollout_loop import REDIS_AWAY, RolloutLoop, RolloutSettings
from services.env_agents.running_group import GroupRules
from shared.configuration import EnvAgentsSection
from shared.environment_spec import EnvironmentLimits, EnvironmentSpec
from shared.keys import Keys
from shared.ledger import AdmissionLedger
from shared.redis_connections import keep_cancellations


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, and the special tokens of Qwen3's chat format."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={character: index for index, character in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.add_tokens(["<|im_start|>"], special_tokens=True)
    fast.add_tokens(["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"])
    return fast


@pytest.fixture(scope="session")
def renderer(tokenizer) -> ChatRenderer:
    config = renderers.Qwen3RendererConfig(thinking_retention="all")
    return ChatRenderer(tokenizer, renderers.create_renderer(tokenizer, config))


@dataclass
class FakeHub:
    """Answers /generate with what `policy` makes of the conversation's text so far."""

    tokenizer: PreTrainedTokenizerFast
    policy: Callable[[str], str | Awaitable[str]] = lambda text: "42<|im_end|>"
    version: int = 0
    url: str = ""
    requests: list[dict] = field(default_factory=list)
    session_ids: list[str] = field(default_factory=list)
    transports: list[asyncio.Transport] = field(default_factory=list)
    """Of the connections that requests came on."""
    faults: list[int] = field(default_factory=list)
    """HTTP statuses to answer first; 0 closes the connection."""

    async def generate(self, request: web.Request) -> web.Response:
        if self.faults:
            status = self.faults.pop(0)
            if status == 0:
                request.transport.close()
            return web.json_response({"detail": "a fault"}, status=status or 500)
        body = await request.json()
        self.requests.append(body)
        self.transports.append(request.transport)
        self.session_ids.append(request.headers["X-Session-Id"])
        answer = self.policy(self.tokenizer.decode(body["input_ids"]))
        text = answer if isinstance(answer, str) else await answer
        return web.Response(body=self.response(text, body["sampling_params"]["max_new_tokens"]), content_type="application/json")

    def response(self, text: str, max_new_tokens: int) -> bytes:
        """SGLang's answer."""
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        is_cut = len(ids) > max_new_tokens
        ids = ids[:max_new_tokens]
        meta_info = {
            "output_token_logprobs": [[-0.5 - index / 1000, token_id, None] for index, token_id in enumerate(ids)],
            "weight_versions": [{"version": str(self.version), "start": 0, "end": len(ids)}] if ids else [],
            "finish_reason": {"type": "length"} if is_cut else {"type": "stop"},
        }
        return json.dumps({"output_ids": ids, "meta_info": meta_info}).encode()


@pytest.fixture
async def hub(tokenizer) -> AsyncIterator[FakeHub]:
    hub = FakeHub(tokenizer)
    app = web.Application()
    app.router.add_post("/generate", hub.generate)
    async with TestServer(app) as server:
        hub.url = str(server.make_url("")).rstrip("/")
        yield hub


@pytest.fixture
async def http_session() -> AsyncIterator[aiohttp.ClientSession]:
    """For the hub, and as agents connect to remote environments on this machine."""
    async with remote_session(RemoteHosts(EnvAgentsSection().environment_hosts)) as session:
        yield session


@pytest.fixture
def client(http_session, hub, renderer) -> GenerationClient:
    return GenerationClient(http_session, hub.url, stop_token_ids=renderer.stop_token_ids)


@pytest.fixture
def agent(renderer, client) -> EnvironmentAgent:
    return EnvironmentAgent(renderer, client)


@pytest.fixture
async def redis_async(redis_url) -> AsyncIterator[redis.asyncio.Redis]:
    async with redis.asyncio.Redis.from_url(redis_url, retry=Retry(NoBackoff(), 0)) as client:
        keep_cancellations(client.connection_pool)
        yield client


@pytest.fixture
def registry(redis_async, keys: Keys, http_session, renderer, client) -> EnvironmentRegistry:
    loader = EnvironmentLoader(http_session, renderer, client, import_allowlist=("examples", "gymnasium"), seed=0)
    return EnvironmentRegistry(redis_async, keys, loader)


@pytest.fixture
def application(registry, agent, renderer, redis_async, keys) -> FastAPI:
    """The HTTP interface of a process named `owner`, whose RolloutLoop stands still."""
    ledger, metrics = AdmissionLedger(redis_async, keys), AgentMetrics()
    statistics = RunStatistics(redis_async, keys, process="owner")
    settings = RolloutSettings(run_id="run", owner="owner", groups=GroupRules(2), lease_s=30.0)
    rollouts = RolloutLoop(settings, ledger, registry, agent, metrics, statistics)
    hold = functools.partial(held, ledger, lease_s=30.0, passing=REDIS_AWAY)
    evaluator = Evaluator(run_id="run", registry=registry, agent=agent, hold_rollouts=hold, decode=renderer.text)
    return create_control(registry, evaluator, rollouts, ledger, metrics, statistics)


@pytest.fixture
async def http(application) -> AsyncIterator[httpx.AsyncClient]:
    transport, headers = httpx.ASGITransport(application), {"Content-Type": "application/json"}
    async with httpx.AsyncClient(transport=transport, base_url="http://agents", headers=headers) as client:
        yield client


@pytest.fixture
async def openenv_server() -> AsyncIterator[TestServer]:
    """Enough of an OpenEnv server to register it."""

    async def schema(_: web.Request) -> web.Response:
        return web.json_response({"action": {"properties": {"guess": {"type": "integer"}}}})

    app = web.Application()
    app.router.add_get("/schema", schema)
    async with TestServer(app) as server:
        yield server


@pytest.fixture
def identity() -> EpisodeIdentity:
    return EpisodeIdentity(
        run_id="run",
        trajectory_id=str(uuid.uuid4()),
        group_id="group",
        group_size=2,
        sample_index=1,
        attempt=0,
        environment="test",
        task_id="0",
    )


@pytest.fixture
def make_spec() -> Callable[..., EnvironmentSpec]:
    def make(name: str = "test", **limits) -> EnvironmentSpec:
        return EnvironmentSpec(name=name, import_path="examples.calculator:Calculator", limits=EnvironmentLimits(**limits))

    return make


@pytest.fixture
def question_environment() -> Iterator[type[Environment]]:
    """Asks one question and takes 42 for right; counts what is open."""

    class Question(Environment):
        num_open = 0

        def __init__(self) -> None:
            type(self).num_open += 1

        async def reset(self, task):
            return [{"role": "user", "content": "what is 6 * 7?"}]

        async def score(self, answer):
            return float(answer == "42")

        async def close(self):
            type(self).num_open -= 1

    yield Question
    assert Question.num_open == 0, "every environment must be closed"
