"""The hub's client: token ids in, token ids with log-probabilities and policy versions out."""

import asyncio
import random
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
import msgspec

from shared.decoding import UNDECODABLE
from shared.environment_spec import SamplingParameters
from shared.errors import EpisodeError
from shared.versions import VersionSpan, version_of_label

_FIRST_BACKOFF_S = 0.1
_LONGEST_BACKOFF_S = 5.0
_MAX_ENDED_SESSIONS = 64
_PASSING_STATUSES = (429, 503)
"""Too many calls at once, or no engine: the same call may go through later."""


class GenerationError(EpisodeError):
    """The hub refused the request, or answered something that is not a generation."""


class GenerationDeadlineError(GenerationError):
    """The hub did not answer within the episode's deadline."""


class Generation(msgspec.Struct, frozen=True):
    """One turn as sampled: n token ids, their behaviour log-probabilities, and spans over [0, n) by policy version."""

    token_ids: list[int]
    logprobs: list[float]
    version_spans: list[VersionSpan]
    is_cut: bool
    """Whether the length limit ended it, rather than a stop token."""


class _FinishReason(msgspec.Struct):
    type: str
    message: str = ""


class _VersionRange(msgspec.Struct):
    version: str
    start: int
    end: int


class _MetaInfo(msgspec.Struct):
    output_token_logprobs: list[tuple[float, int, Any]]
    weight_versions: list[_VersionRange]
    finish_reason: _FinishReason


class _Response(msgspec.Struct):
    meta_info: _MetaInfo


_response_decoder = msgspec.json.Decoder(_Response)


class GenerationClient:
    """Asks the hub for one turn, and asks again while the hub is away or has no engine, up to a deadline."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        hub_url: str,
        *,
        stop_token_ids: Sequence[int],
        access: Mapping[str, str] | None = None,
    ) -> None:
        """Args: access: headers that open the hub."""
        self._session = session
        self._headers = {"Content-Type": "application/json", **(access or {})}
        self._ended_sessions: deque[str] = deque(maxlen=_MAX_ENDED_SESSIONS)
        self._url = f"{hub_url.rstrip('/')}/generate"
        self._stop_token_ids = list(stop_token_ids)

    async def generate(
        self,
        token_ids: Sequence[int],
        *,
        sampling: SamplingParameters,
        max_new_tokens: int,
        is_greedy: bool,
        session_id: str,
        deadline: float,
        environment: str = "",
        is_validation: bool = False,
    ) -> Generation:
        """The next turn after `token_ids`. `deadline` is on the event loop's clock.

        Raises: GenerationDeadlineError at the deadline; GenerationError if the hub refuses or answers nonsense.
        """
        body = msgspec.json.encode(
            {
                "input_ids": token_ids,
                "sampling_params": {
                    "max_new_tokens": max_new_tokens,
                    "temperature": 0.0 if is_greedy else sampling.temperature,
                    "top_p": sampling.top_p,
                    "top_k": sampling.top_k,
                    "stop_token_ids": self._stop_token_ids,
                },
                "return_logprob": True,
            }
        )
        headers = self._headers | {"X-Session-Id": session_id}
        if environment:
            headers["X-Environment"] = environment
        if is_validation:
            headers["X-Purpose"] = "validation"
        if self._ended_sessions:
            headers["X-Ended-Sessions"] = ",".join(self._ended_sessions)
            self._ended_sessions.clear()
        backoff_s = _FIRST_BACKOFF_S
        while True:
            answer = await self._ask(body, headers, deadline)
            if answer is not None:
                return read_generation(answer)
            await asyncio.sleep(min(backoff_s * random.uniform(0.5, 1.0), _remaining_s(deadline)))  # noqa: S311 - jitter
            backoff_s = min(2 * backoff_s, _LONGEST_BACKOFF_S)

    def end_session(self, session_id: str) -> None:
        """The session makes no more calls. The next call of another tells the hub, which then lets new episodes begin."""
        self._ended_sessions.append(session_id)

    async def _ask(self, body: bytes, headers: dict[str, str], deadline: float) -> bytes | None:
        """The hub's answer, or None if asking again may help."""
        timeout = aiohttp.ClientTimeout(total=_remaining_s(deadline))
        try:
            async with self._session.post(self._url, data=body, headers=headers, timeout=timeout) as response:
                answer = await response.read()
        except (TimeoutError, aiohttp.ClientConnectionError, aiohttp.ClientPayloadError):
            return None
        if response.status in _PASSING_STATUSES:
            return None
        if response.status >= 400:
            raise GenerationError(f"the hub refused to generate ({response.status}): {answer[:500].decode(errors='replace')}")
        return answer


def _remaining_s(deadline: float) -> float:
    remaining_s = deadline - asyncio.get_running_loop().time()
    if remaining_s <= 0:
        raise GenerationDeadlineError("the episode's deadline passed while it waited for the hub")
    return remaining_s


def read_generation(answer: bytes) -> Generation:
    """The generation in the hub's answer.

    Raises: GenerationError unless every sampled token has a log-probability and exactly one policy version.
    """
    try:
        meta_info = _response_decoder.decode(answer).meta_info
    except UNDECODABLE as error:
        raise GenerationError(f"the hub's answer is not a generation with log-probabilities and versions: {error}") from error
    if meta_info.finish_reason.type == "abort":
        raise GenerationError(f"the hub aborted the generation: {meta_info.finish_reason.message or 'no reason given'}")
    token_ids = [token_id for _, token_id, _ in meta_info.output_token_logprobs]
    spans = [VersionSpan(item.start, item.end, _version(item.version)) for item in meta_info.weight_versions]
    covered = [position for span in spans for position in range(span.start, span.end)]
    if covered != list(range(len(token_ids))):
        raise GenerationError(f"policy versions must cover all {len(token_ids)} sampled tokens once, got {spans}")
    return Generation(
        token_ids=token_ids,
        logprobs=[logprob for logprob, _, _ in meta_info.output_token_logprobs],
        version_spans=spans,
        is_cut=meta_info.finish_reason.type == "length",
    )


def _version(label: str) -> int:
    if (version := version_of_label(label)) is None:
        raise GenerationError(f"an engine's weight version must be a decimal number, got {label!r}")
    return version
