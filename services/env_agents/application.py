"""The agent process from start to shutdown: clients, registry, RolloutLoop and HTTP server under one TaskGroup."""

import asyncio
import contextlib
import functools
import logging
import math
import os
import signal
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import aiohttp
import redis.asyncio
import uvicorn
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from services.env_agents.access import Access
from services.env_agents.control import create_control
from services.env_agents.episode import EnvironmentAgent
from services.env_agents.episode_statistics import RunStatistics
from services.env_agents.evaluation import Evaluator
from services.env_agents.generation import GenerationClient
from services.env_agents.group_filters import load_filters
from services.env_agents.holds import held
from services.env_agents.loading import EnvironmentLoader
from services.env_agents.metrics import AgentMetrics
from services.env_agents.registry import EnvironmentRegistry
from services.env_agents.remote_hosts import RemoteHosts, remote_session
from services.env_agents.rendering import load_renderer
from services.env_agents.rollout_loop import REDIS_AWAY, RolloutLoop, RolloutSettings
from services.env_agents.running_group import GroupRules
from shared.agents_token import agents_token
from shared.configuration import Configuration, EnvAgentsSection, RedisSection, RolloutSection
from shared.errors import ConfigurationError
from shared.hub_tokens import hub_tokens
from shared.keys import Keys
from shared.ledger import AdmissionLedger
from shared.loop_lag import watch_loop_lag
from shared.redis_address import PROTOCOL, connection_url
from shared.redis_checks import require_usable_async
from shared.redis_connections import keep_cancellations

_REDIS_TIMEOUT_S = 10.0
_MAX_REDIS_CONNECTIONS = 32
_CONNECT_TIMEOUT_S = 10.0
_SHUTDOWN_TIMEOUT_S = 2
_EXIT_WITHIN_S = 9.0
_NUM_ENVIRONMENT_THREADS = 64

_logger = logging.getLogger(__name__)


class ControlServer(uvicorn.Server):
    """uvicorn without signal handlers of its own: the process decides in which order it shuts down."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def run(configuration: Configuration) -> None:
    """Serves until SIGTERM or SIGINT. Raises: ConfigurationError if it cannot start."""
    # Tools and Gymnasium environments block in these threads; one that hangs must not take the others' only thread.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_NUM_ENVIRONMENT_THREADS, "environment"))
    section = configuration.env_agents
    token = agents_token()
    async with (
        redis_client(configuration.redis) as client,
        _hub_session() as session,
        remote_session(RemoteHosts(section.environment_hosts)) as remote,
    ):
        renderer = load_renderer(Path(configuration.run.model_path), section.renderer, section.renderer_options)
        keys = Keys(configuration.run.id)
        ledger = AdmissionLedger(client, keys)
        rollout = configuration.rollout
        groups = _group_rules(rollout, section.import_allowlist)
        await ledger.configure(
            async_generation_ratio=rollout.async_generation_ratio,
            batch_groups=rollout.rollout_batch_size,
            redundant_groups=rollout.redundant_groups,
        )
        hub = GenerationClient(
            session,
            configuration.inference_hub.address,
            stop_token_ids=renderer.stop_token_ids,
            access=hub_tokens().for_generating,
        )
        loader = EnvironmentLoader(remote, renderer, hub, import_allowlist=section.import_allowlist, seed=configuration.run.seed)
        registry = EnvironmentRegistry(client, keys, loader)
        for spec in section.environments:
            await registry.declare(spec)
        await registry.refresh()
        metrics = AgentMetrics()
        process = f"{socket.gethostname()}:{os.getpid()}"
        statistics = RunStatistics(client, keys, process=process)
        agent = EnvironmentAgent(renderer, hub)
        settings = RolloutSettings(
            run_id=configuration.run.id,
            owner=process,
            groups=groups,
            lease_s=section.lease_s,
        )
        rollouts = RolloutLoop(settings, ledger, registry, agent, metrics, statistics)
        evaluator = Evaluator(
            run_id=configuration.run.id,
            registry=registry,
            agent=agent,
            hold_rollouts=functools.partial(held, ledger, lease_s=section.lease_s, passing=REDIS_AWAY),
            decode=renderer.text,
        )
        app = create_control(registry, evaluator, rollouts, ledger, metrics, statistics)
        await _serve(Access(app, token), section, rollouts, metrics)


def _group_rules(rollout: RolloutSection, import_allowlist: Sequence[str]) -> GroupRules:
    return GroupRules(
        size=rollout.num_return_sequences_in_group,
        redundant_episodes=rollout.redundant_episodes,
        deadline_s=math.inf if rollout.group_deadline_s is None else rollout.group_deadline_s,
        min_size=rollout.min_group_size,
        filters=load_filters(rollout.group_filters, import_allowlist=import_allowlist),
    )


async def _serve(app: Access, section: EnvAgentsSection, rollouts: RolloutLoop, metrics: AgentMetrics) -> None:
    stop = _stop_on_signals()
    listening = _listen(section.host, section.port)
    config = uvicorn.Config(
        app,
        lifespan="off",
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=_SHUTDOWN_TIMEOUT_S,
    )
    server = ControlServer(config)
    _logger.info("listening on http://%s:%d", *listening.getsockname()[:2])
    async with asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(server.serve(sockets=[listening]))
        rolling_out = tasks.create_task(rollouts.run())
        watching = tasks.create_task(watch_loop_lag(metrics.loop_lag.observe))
        await stop.wait()
        _logger.info("stopping: no new groups; what does not end soon is left to other agent processes")
        # An environment that does not let itself be cancelled must not keep the process from ending.
        asyncio.get_running_loop().call_later(_EXIT_WITHIN_S, os._exit, 1)
        rollouts.stop()
        await rolling_out
        server.should_exit = True
        await serving
        watching.cancel()


def _stop_on_signals() -> asyncio.Event:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port))
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise ConfigurationError(
            f"env_agents.port must be free, and {host}:{port} is not ({reason}); choose another with --set env_agents.port=0"
        ) from error


@contextlib.asynccontextmanager
async def redis_client(section: RedisSection) -> AsyncIterator[redis.asyncio.Redis]:
    """A client that leaves repetition to its callers, and whose calls wait for a connection when many episodes end at once."""
    pool = redis.asyncio.BlockingConnectionPool.from_url(
        connection_url(section.url),
        protocol=PROTOCOL,
        max_connections=_MAX_REDIS_CONNECTIONS,
        timeout=_REDIS_TIMEOUT_S,
        socket_timeout=_REDIS_TIMEOUT_S,
        socket_connect_timeout=_REDIS_TIMEOUT_S,
        retry=Retry(NoBackoff(), 0),
    )
    keep_cancellations(pool)
    async with redis.asyncio.Redis.from_pool(pool) as client:
        await require_usable_async(client, section)
        yield client


def _hub_session() -> aiohttp.ClientSession:
    """The episodes in flight bound its connections."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None, sock_connect=10)
    )
