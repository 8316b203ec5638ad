"""The Environment Agent: one coroutine plays one episode. Whatever goes wrong becomes the episode's outcome."""

import asyncio
import hashlib
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec

from services.env_agents.deadlines import DeadlineError, deadline
from services.env_agents.environment import Action, Environment, Message, Task
from services.env_agents.environment_answers import checked_messages, checked_step
from services.env_agents.environment_start import StartedEnvironment, started_environment, timed_in_environment
from services.env_agents.episode_log import EpisodeIdentity, EpisodeLog
from services.env_agents.generation import GenerationClient, GenerationDeadlineError
from services.env_agents.rendering import ChatRenderer, PrefixError
from services.env_agents.rewards import DeclaredReward, FinishedEpisode
from shared.environment_spec import EnvironmentLimits, EnvironmentSpec
from shared.errors import EpisodeError
from shared.trajectory import Outcome, Trajectory

_DETAIL_CHARACTERS = 2_000


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
        reward: DeclaredReward | None = None,
        is_greedy: bool = False,
        is_validation: bool = False,
        queued_s: float = 0.0,
        before_sampling: Callable[[], Awaitable[None]] | None = None,
        when_cancelled: Callable[[int], None] | None = None,
    ) -> Trajectory:
        """One episode from start to end; raises nothing but its own cancellation.

        The declared reward is asked for as soon as the environment has completed the episode and is closed.
        A CancelledError that nobody asked this task for, and a SystemExit, are the environment's own.

        Args: before_sampling: awaited once, before the policy's first turn. when_cancelled: told how many tokens the policy had
        sampled in the turns that it had finished, before this coroutine's cancellation goes on.
        """
        log = EpisodeLog(identity, temperature=spec.sampling.temperature)
        log.queued_s = queued_s
        try:
            async with (
                deadline(spec.limits.episode_timeout_s, "the episode"),
                started_environment(create_environment, task, spec.limits, log) as start,
            ):
                finished = await self._play(
                    start, spec, task, log, is_greedy=is_greedy, is_validation=is_validation, before_sampling=before_sampling
                )
            if reward is not None:
                await _add_reward(reward, finished, log)
        except (_Truncated, PrefixError) as ending:
            if spec.limits.truncation_reward:
                log.add_reward(spec.limits.truncation_reward, {"truncation": spec.limits.truncation_reward})
            return log.trajectory(Outcome.TRUNCATED, str(ending))
        except (DeadlineError, GenerationDeadlineError) as error:
            return log.trajectory(Outcome.TIMEOUT, str(error))
        except EpisodeError as error:
            return log.trajectory(Outcome.ENVIRONMENT_ERROR, str(error))
        except (Exception, asyncio.CancelledError, SystemExit):
            if (task_of_agent := asyncio.current_task()) and task_of_agent.cancelling():
                if when_cancelled is not None:
                    when_cancelled(log.num_sampled_tokens)
                raise
            return log.trajectory(Outcome.ENVIRONMENT_ERROR, traceback.format_exc()[-_DETAIL_CHARACTERS:])
        finally:
            self._client.end_session(identity.trajectory_id)
        return log.trajectory(Outcome.COMPLETED, "")

    async def _play(
        self,
        start: StartedEnvironment,
        spec: EnvironmentSpec,
        task: Task,
        log: EpisodeLog,
        *,
        is_greedy: bool,
        is_validation: bool,
        before_sampling: Callable[[], Awaitable[None]] | None,
    ) -> FinishedEpisode:
        limits, environment, messages = spec.limits, start.environment, start.messages
        generate_until = asyncio.get_running_loop().time() + limits.episode_timeout_s
        tools = environment.tool_specs()
        prompt_ids = self._renderer.prompt(messages, tools)
        if len(prompt_ids) >= limits.max_tokens:
            raise EpisodeError(
                f"the prompt must leave room in limits.max_tokens = {limits.max_tokens}, got {len(prompt_ids)} tokens"
            )
        log.add_context(prompt_ids)
        conversation: list[Mapping[str, Any]] = list(messages)
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
                deadline=generate_until,
                environment=log.identity.environment,
                is_validation=is_validation,
            )
            log.generating_s += time.perf_counter() - started
            log.add_turn(generation, state_fingerprint=_fingerprint(environment.state(), messages))
            if generation.is_cut:
                raise _Truncated(f"a turn was cut at {len(generation.token_ids)} tokens")
            action = self._renderer.parse(prompt_ids, generation.token_ids, tools)
            try:
                async with timed_in_environment(log, *_bound(environment, action, limits)):
                    step = checked_step(await environment.step(action))
            except DeadlineError:
                if limits.timeout_reward is not None:
                    log.state_reward(limits.timeout_reward, "timeout")
                raise
            log.environment_s -= step.reward_s
            log.reward_s += step.reward_s
            log.answer_turn(reward=step.reward, reward_parts=step.reward_parts, tool_calls=step.tool_calls)
            conversation += [_spoken(action), *step.messages]
            if step.done:
                return FinishedEpisode(task, conversation, action.text)
            messages = checked_messages(step.messages)
            added_ids = self._renderer.extend(prompt_ids, generation.token_ids, messages, tools)
            if log.num_tokens + len(added_ids) >= limits.max_tokens:
                raise _Truncated(f"the episode reached limits.max_tokens = {limits.max_tokens}")
            log.add_context(added_ids)
        raise _Truncated(f"the episode reached limits.max_turns = {limits.max_turns}")


async def _add_reward(reward: DeclaredReward, finished: FinishedEpisode, log: EpisodeLog) -> None:
    started = time.perf_counter()
    try:
        scored = await reward.score(finished)
    finally:
        log.reward_s += time.perf_counter() - started
    log.add_reward(scored.reward, scored.parts)


def _bound(environment: Environment, action: Action, limits: EnvironmentLimits) -> tuple[float, str]:
    """Deadline and name of what the environment is about to do."""
    if environment.only_scores(action):
        return limits.score_timeout_s, "the score"
    return limits.step_timeout_s, "a step"


def _spoken(action: Action) -> Mapping[str, Any]:
    """A turn of the policy as a message."""
    if not action.tool_calls:
        return {"role": "assistant", "content": action.text}
    calls = [{"type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in action.tool_calls]
    return {"role": "assistant", "content": action.text, "tool_calls": calls}


def _fingerprint(state: str | None, messages: Sequence[Message]) -> str:
    """Equal for equal states of the environment: of what it says its state is, else of the messages it answered last."""
    described = state.encode() if state is not None else msgspec.json.encode(messages)
    return hashlib.blake2b(described, digest_size=8).hexdigest()
