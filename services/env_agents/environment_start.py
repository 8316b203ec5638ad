"""An environment's life around one episode: made, opened and reset, anew where that may be tried again; closed in the end."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum

import aiohttp

from services.env_agents.deadlines import DeadlineError, deadline
from services.env_agents.environment import Environment, Message, Task
from services.env_agents.environment_answers import checked_messages
from services.env_agents.episode_log import EpisodeLog
from services.env_agents.retries import RetryBudget
from shared.environment_spec import EnvironmentLimits

_CLOSE_TIMEOUT_S = 5.0

_logger = logging.getLogger(__name__)


class StartProblem(StrEnum):
    """Why an environment did not start; the fields of StartRetries."""

    TIMEOUT = "timeout"
    UNREACHABLE = "unreachable"
    ERROR = "error"

    @classmethod
    def of(cls, error: Exception) -> "StartProblem":
        match error:
            case DeadlineError():
                return cls.TIMEOUT
            case ConnectionError() | aiohttp.ClientConnectionError():
                return cls.UNREACHABLE
            case _:
                return cls.ERROR


@dataclass(frozen=True)
class StartedEnvironment:
    environment: Environment
    messages: list[Message]
    """What it said at `reset`."""


@asynccontextmanager
async def started_environment(
    create: Callable[[], Environment], task: Task, limits: EnvironmentLimits, log: EpisodeLog
) -> AsyncIterator[StartedEnvironment]:
    """An environment after `reset`, closed afterwards whatever happens. The policy has not acted yet, so a new one is as good.

    Raises: what its last start raised, when the retries for that are used up.
    """
    budget = RetryBudget(limits.start_retries)
    while True:
        try:
            start = await _start(create, task, limits, log)
            break
        except Exception as error:
            if not await budget.spend(StartProblem.of(error)):
                raise
            _logger.info("environment %s starts anew: %s", log.identity.environment, error)
    try:
        yield start
    finally:
        await _close(start.environment, log)


async def _start(create: Callable[[], Environment], task: Task, limits: EnvironmentLimits, log: EpisodeLog) -> StartedEnvironment:
    environment = create()
    try:
        begun = time.perf_counter()
        async with deadline(limits.open_timeout_s, "open"):
            await environment.open()
        log.queued_s += time.perf_counter() - begun
        async with timed_in_environment(log, limits.reset_timeout_s, "reset"):
            return StartedEnvironment(environment, checked_messages(await environment.reset(task)))
    except BaseException:
        await _close(environment, log)
        raise


async def _close(environment: Environment, log: EpisodeLog) -> None:
    try:
        async with asyncio.timeout(_CLOSE_TIMEOUT_S):
            await environment.close()
    except Exception:
        _logger.exception("environment %s failed to close; its episode stands", log.identity.environment)


@asynccontextmanager
async def timed_in_environment(log: EpisodeLog, seconds: float, what: str) -> AsyncIterator[None]:
    """A call of the environment, with its deadline and in the episode's timings."""
    begun = time.perf_counter()
    try:
        async with deadline(seconds, what):
            yield
    finally:
        log.environment_s += time.perf_counter() - begun
