"""The Environment Agent: one coroutine plays one episode. Whatever goes wrong becomes the episode's outcome."""

import asyncio
import hashlib
import logging
import math
import numbers
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import msgspec

from services.env_agents.environment import Environment, Message, Step, Task
from services.env_agents.episode_log import EpisodeIdentity, EpisodeLog
from services.env_agents.generation import GenerationClient, GenerationDeadlineError
from services.env_agents.rendering import ChatRenderer, PrefixError
from shared.environment_spec import EnvironmentSpec
from shared.errors import EpisodeError
from shared.trajectory import Outcome, ToolCall, Trajectory

_CLOSE_TIMEOUT_S = 5.0
_DETAIL_CHARACTERS = 2_000

_logger = logging.getLogger(__name__)


class DeadlineError(EpisodeError):
    """The environment, or the whole episode, passed its deadline."""


class _Truncated(Exception):  # noqa: N818 - an ending, not an error
    """The episode reached a limit."""


class EnvironmentAgent:
    """Plays episodes: reset → render → (generate → parse → act)* → trajectory."""

    def __init__(self, renderer: ChatRenderer, client: GenerationClient) -> None:
        self._renderer = renderer
        self._client = client

    async def run(
        self,
        create_environment: Callable[[], Environment],
        spec: EnvironmentSpec,
        task: Task,
        identity: EpisodeIdentity,
        *,
        is_greedy: bool = False,
        queued_s: float = 0.0,
        before_sampling: Callable[[], Awaitable[None]] | None = None,
    ) -> Trajectory:
        """One episode from start to end; raises nothing but its own cancellation.

        Args: before_sampling: awaited once, before the policy's first turn.
        A CancelledError that nobody asked this task for, and a SystemExit, are the environment's own.
        """
        log = EpisodeLog(identity, temperature=spec.sampling.temperature)
        log.queued_s = queued_s
        try:
            async with _deadline(spec.limits.episode_timeout_s, "the episode"), _opened(create_environment, log) as environment:
                await self._play(environment, spec, task, log, is_greedy=is_greedy, before_sampling=before_sampling)
        except (_Truncated, PrefixError) as ending:
            return log.trajectory(Outcome.TRUNCATED, str(ending))
        except (DeadlineError, GenerationDeadlineError) as error:
            return log.trajectory(Outcome.TIMEOUT, str(error))
        except EpisodeError as error:
            return log.trajectory(Outcome.ENVIRONMENT_ERROR, str(error))
        except (Exception, asyncio.CancelledError, SystemExit):
            if (task_of_agent := asyncio.current_task()) and task_of_agent.cancelling():
                raise
            return log.trajectory(Outcome.ENVIRONMENT_ERROR, traceback.format_exc()[-_DETAIL_CHARACTERS:])
        return log.trajectory(Outcome.COMPLETED, "")

    async def _play(
        self,
        environment: Environment,
        spec: EnvironmentSpec,
        task: Task,
        log: EpisodeLog,
        *,
        is_greedy: bool,
        before_sampling: Callable[[], Awaitable[None]] | None,
    ) -> None:
        limits = spec.limits
        deadline = asyncio.get_running_loop().time() + limits.episode_timeout_s
        async with _timed_in_environment(log, limits.reset_timeout_s, "reset"):
            messages = _checked_messages(await environment.reset(task))
        tools = environment.tool_specs()
        prompt_ids = self._renderer.prompt(messages, tools)
        if len(prompt_ids) >= limits.max_tokens:
            raise EpisodeError(
                f"the prompt must leave room in limits.max_tokens = {limits.max_tokens}, got {len(prompt_ids)} tokens"
            )
        log.add_context(prompt_ids)
        if before_sampling is not None:
            await before_sampling()
        for _ in range(limits.max_turns):
            prompt_ids = log.token_ids.copy()
            started = time.perf_counter()
            generation = await self._client.generate(
                prompt_ids,
                sampling=spec.sampling,
                max_new_tokens=min(spec.sampling.max_new_tokens, limits.max_tokens - log.num_tokens),
                is_greedy=is_greedy,
                session_id=log.identity.trajectory_id,
                deadline=deadline,
            )
            log.generating_s += time.perf_counter() - started
            log.add_turn(generation, state_fingerprint=_fingerprint(environment.state(), messages))
            if generation.is_cut:
                raise _Truncated(f"a turn was cut at {len(generation.token_ids)} tokens")
            action = self._renderer.parse(prompt_ids, generation.token_ids, tools)
            async with _timed_in_environment(log, limits.step_timeout_s, "a step"):
                step = _checked_step(await environment.step(action))
            log.environment_s -= step.reward_s
            log.reward_s += step.reward_s
            log.answer_turn(reward=step.reward, reward_parts=step.reward_parts, tool_calls=step.tool_calls)
            if step.done:
                return
            messages = _checked_messages(step.messages)
            added_ids = self._renderer.extend(prompt_ids, generation.token_ids, messages, tools)
            if log.num_tokens + len(added_ids) >= limits.max_tokens:
                raise _Truncated(f"the episode reached limits.max_tokens = {limits.max_tokens}")
            log.add_context(added_ids)
        raise _Truncated(f"the episode reached limits.max_turns = {limits.max_turns}")


@asynccontextmanager
async def _deadline(seconds: float, what: str) -> AsyncIterator[None]:
    """Ends its block as DeadlineError after `seconds`; a TimeoutError of the environment's own passes through."""
    scope = asyncio.timeout(seconds)
    try:
        async with scope:
            yield
    except TimeoutError as error:
        if scope.expired():
            raise DeadlineError(f"{what} took longer than {seconds:g} s") from error
        raise


@asynccontextmanager
async def _timed_in_environment(log: EpisodeLog, seconds: float, what: str) -> AsyncIterator[None]:
    started = time.perf_counter()
    try:
        async with _deadline(seconds, what):
            yield
    finally:
        log.environment_s += time.perf_counter() - started


@asynccontextmanager
async def _opened(create_environment: Callable[[], Environment], log: EpisodeLog) -> AsyncIterator[Environment]:
    """A new environment, closed afterwards whatever happens."""
    environment = create_environment()
    try:
        started = time.perf_counter()
        await environment.open()
        log.queued_s += time.perf_counter() - started
        yield environment
    finally:
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await environment.close()
        except Exception:
            _logger.exception("environment %s failed to close; its episode stands", log.identity.environment)


def _checked_messages(messages: object) -> list[Message]:
    try:
        checked = msgspec.convert(messages, list[Message])
    except msgspec.ValidationError as error:
        raise EpisodeError(
            f"an environment's messages must be a list of {{role, content}}, got {messages!r:.200}: {error}"
        ) from error
    if not checked:
        raise EpisodeError("an environment that is not done must answer with at least one message, got none")
    return checked


def _checked_step(step: object) -> Step:
    if not isinstance(step, Step):
        raise EpisodeError(f"step must return a Step, got {step!r:.200}")
    try:
        return Step(
            messages=step.messages,
            reward=_checked_number(step.reward),
            done=bool(step.done),
            reward_parts={str(name): _checked_number(part) for name, part in step.reward_parts.items()},
            tool_calls=msgspec.convert(msgspec.to_builtins(step.tool_calls), tuple[ToolCall, ...]),
            reward_s=_checked_number(step.reward_s),
        )
    except (msgspec.ValidationError, TypeError, AttributeError) as error:
        raise EpisodeError(f"a Step's fields must have the types that it declares: {error}, got {step!r:.200}") from error


def _checked_number(value: object) -> float:
    """A plain float: numpy's scalars count as numbers, and the record's codec does not know them."""
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise EpisodeError(f"a reward must be a finite number, got {value!r:.200}")
    return float(value)


def _fingerprint(state: str | None, messages: Sequence[Message]) -> str:
    """Equal for equal states of the environment: of what it says its state is, else of the messages it answered last."""
    described = state.encode() if state is not None else msgspec.json.encode(messages)
    return hashlib.blake2b(described, digest_size=8).hexdigest()
