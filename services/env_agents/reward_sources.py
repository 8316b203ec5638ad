"""The three ways to a declared reward: a function, an HTTP service, a judge behind the hub."""

import asyncio
import inspect
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import aiohttp
import msgspec

from services.env_agents.bounded_answers import AnswerTooLargeError, read_bounded
from services.env_agents.generation import GenerationClient, GenerationDeadlineError, GenerationError
from services.env_agents.identifiers import uuid7
from services.env_agents.remote_hosts import HostNotAllowedError, RedirectError
from services.env_agents.rendering import ChatRenderer
from services.env_agents.rewards import FinishedEpisode, RewardError, RewardProblem
from services.env_agents.tools import as_text
from shared.decoding import UNDECODABLE
from shared.environment_spec import HttpReward, JudgeReward

_PASSING_STATUSES = (429, 502, 503, 504)
_MAX_ANSWER_BYTES = 2**20
_DETAIL_CHARACTERS = 1_000
_MAX_JUDGED_CHARACTERS = 10_000
"""Of a judge's text, from its end, that the pattern is searched in."""
_PLACEHOLDER = re.compile(r"{(prompt|answer|ground_truth|transcript)}")


class FunctionSource:
    """A function of the finished episode, called with more keyword arguments."""

    def __init__(self, function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
        self._function = function
        self._arguments = arguments

    async def score(self, episode: FinishedEpisode) -> object:
        try:
            if inspect.iscoroutinefunction(self._function):
                return await self._function(episode, **self._arguments)
            answer = await asyncio.to_thread(self._function, episode, **self._arguments)
            return await answer if inspect.isawaitable(answer) else answer
        except Exception as error:  # Somebody's function may raise anything.
            raise RewardError(RewardProblem.ERROR, traceback.format_exc()[-_DETAIL_CHARACTERS:]) from error


class HttpSource:
    """A service that scores what is posted to it, over a session of `remote_session`."""

    def __init__(self, session: aiohttp.ClientSession, spec: HttpReward) -> None:
        self._session = session
        self._url = spec.url

    async def score(self, episode: FinishedEpisode) -> object:
        body = msgspec.json.encode(episode, enc_hook=as_text)
        headers = {"Content-Type": "application/json"}
        try:
            async with self._session.post(self._url, data=body, headers=headers, allow_redirects=False) as response:
                answer = await read_bounded(response, _MAX_ANSWER_BYTES)
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            raise RewardError(RewardProblem.UNREACHABLE, f"{self._url}: {error or type(error).__name__}") from error
        except (aiohttp.ClientError, HostNotAllowedError, RedirectError) as error:
            raise RewardError(RewardProblem.ERROR, f"{self._url}: {error}") from error
        except AnswerTooLargeError as error:
            raise RewardError(RewardProblem.UNUSABLE, str(error)) from error
        self._require_success(response.status, answer)
        try:
            return msgspec.json.decode(answer)
        except UNDECODABLE as error:
            raise RewardError(RewardProblem.UNUSABLE, f"{self._url} must answer JSON {{reward, parts}}: {error}") from error

    def _require_success(self, status: int, answer: bytes) -> None:
        if status in _PASSING_STATUSES:
            raise RewardError(RewardProblem.UNREACHABLE, f"{self._url} answered {status}")
        if status >= 400:
            raise RewardError(RewardProblem.ERROR, f"{self._url} answered {status}: {answer[:500].decode(errors='replace')}")


class JudgeSource:
    """The model behind the hub, asked in its own chat format without tools; the last number that it names is mapped to 0…1."""

    def __init__(self, renderer: ChatRenderer, client: GenerationClient, spec: JudgeReward) -> None:
        self._renderer = renderer
        self._client = client
        self._spec = spec
        self._pattern = re.compile(spec.pattern)

    async def score(self, episode: FinishedEpisode) -> object:
        question = judge_prompt(self._spec.prompt, episode)
        prompt_ids = self._renderer.prompt([{"role": "user", "content": question}], [])
        session_id = f"judge-{uuid7()}"
        try:
            generation = await self._client.generate(
                prompt_ids,
                sampling=self._spec.sampling,
                max_new_tokens=self._spec.sampling.max_new_tokens,
                is_greedy=self._spec.greedy,
                session_id=session_id,
                deadline=asyncio.get_running_loop().time() + self._spec.timeout_s,
            )
        except GenerationDeadlineError as error:
            raise RewardError(RewardProblem.TIMEOUT, f"the judge did not answer within {self._spec.timeout_s:g} s") from error
        except GenerationError as error:
            raise RewardError(RewardProblem.ERROR, f"the judge could not be asked: {error}") from error
        finally:
            self._client.end_session(session_id)
        return self._reward_in(self._renderer.parse(prompt_ids, generation.token_ids, []).text)

    def _reward_in(self, text: str) -> float:
        lowest, highest = self._spec.lowest, self._spec.highest
        named = [match[1] for match in self._pattern.finditer(text[-_MAX_JUDGED_CHARACTERS:])]
        try:
            number = float(named[-1])
        except (IndexError, TypeError, ValueError) as error:
            raise RewardError(RewardProblem.UNUSABLE, f"the judge named no number, in {text[-500:]!r}") from error
        if not lowest <= number <= highest:
            raise RewardError(
                RewardProblem.UNUSABLE, f"the judge's number must be in {lowest:g} … {highest:g}, got {number:g} in {text[-500:]!r}"
            )
        return (number - lowest) / (highest - lowest)


def judge_prompt(template: str, episode: FinishedEpisode) -> str:
    """The template with its placeholders filled in; braces in what fills them in stay as they are."""
    values = {
        "prompt": transcript_text(episode.task.prompt or episode.messages[:1]),
        "answer": episode.answer,
        "ground_truth": as_text(episode.task.answer),
        "transcript": transcript_text(episode.messages),
    }
    return _PLACEHOLDER.sub(lambda match: values[match[1]], template)


def transcript_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """A conversation for a judge to read: who speaks, what is said, which tools are called."""
    lines: list[str] = []
    for message in messages:
        lines.append(f"[{message['role']}] {message['content']}")
        lines.extend(f"[calls] {as_text(call['function'])}" for call in message.get("tool_calls", ()))
    return "\n".join(lines)
