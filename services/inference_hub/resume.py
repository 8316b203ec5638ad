"""What happens to a call after each attempt: done, go on where it stopped, or begin again elsewhere. Pure decisions.

    WAITING ──begin──► TRYING ──answer──► ANSWERED
       ▲                 │
       └──cut or abort───┘

A long call may be asked for in segments, so that an engine's death costs one of them and not the whole.
A call that an engine aborted goes on with its tokens so far appended to the prompt. One whose connection was cut received
nothing and begins again. Only refusals (4xx) and calls that fail on `max_attempts` engines come back to the caller as errors.
"""

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from services.inference_hub import answer as answers
from shared.decoding import UNDECODABLE

DEFAULT_MAX_NEW_TOKENS: Final = 128
"""SGLang's own, when a request does not say."""
NOT_JOINABLE: Final = ("return_hidden_states", "return_routed_experts", "return_indexer_topk", "return_sampling_mask")
"""Per-token data in forms that do not concatenate: a request that asks for it begins again instead of going on."""
FIRST_DELAY_S: Final = 0.05
MAX_DELAY_S: Final = 1.0

TokenId = Annotated[int, Meta(ge=0)]


class RefusedError(Exception):
    """A request the hub answers itself, with a 4xx status and a sentence."""

    def __init__(self, status: int, sentence: str, *, headers: tuple[tuple[str, str], ...] = ()) -> None:
        super().__init__(sentence)
        self.status = status
        self.headers = headers


class Reply(msgspec.Struct, frozen=True):
    """What goes back to the caller."""

    status: int
    body: bytes
    num_tokens: int = 0
    """Output tokens in a 200."""
    cached_tokens: int = 0
    """Of the prompt, found in the engine's cache."""
    num_retractions: int = 0
    """How often the engine took its KV cache away for another request's sake."""
    first_token_s: float | None = None
    """From the request's arrival at the engine to its first token, if the engine says so."""
    headers: tuple[tuple[str, str], ...] = ()
    """Beyond content type and length."""


class _Sampling(msgspec.Struct, frozen=True):
    max_new_tokens: int | msgspec.UnsetType | None = msgspec.UNSET
    n: int = 1


class _Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a request that the hub relies on, but for its prompt; the others are the engine's business."""

    sampling_params: _Sampling | None = None
    stream: bool = False
    extra_key: str | None = None
    rid: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    return_logprob: bool | list[bool] | None = None


class _AnyIds(_Settings, frozen=True, kw_only=True):
    """The ids of a prompt before an engine has said which there are."""

    input_ids: Annotated[list[TokenId], Meta(min_length=1)]


_any_ids_decoder = msgspec.json.Decoder(_AnyIds)


@cache
def _decoder(vocabulary: int | None) -> msgspec.json.Decoder[Any]:
    if vocabulary is None:
        return _any_ids_decoder
    ids = Annotated[list[Annotated[int, Meta(ge=0, lt=vocabulary)]], Meta(min_length=1)]
    return msgspec.json.Decoder(msgspec.defstruct("KnownIds", [("input_ids", ids)], bases=(_Settings,), frozen=True, kw_only=True))


class Request:
    """A caller's request: the bytes that came, what the hub reads of them, and all fields once an attempt has to change some."""

    __slots__ = ("_body", "_extra_key", "_fields", "_is_plain", "asked_tokens", "max_new_tokens", "num_prompt_tokens")

    def __init__(self, body: bytes, settings: _Settings, num_prompt_tokens: int) -> None:
        self._body = body
        self._extra_key = settings.extra_key
        self._is_plain = settings.rid is msgspec.UNSET and settings.extra_key is None and settings.return_logprob in (None, True)
        """The caller has set none of the hub's fields."""
        self._fields: dict[str, Any] | None = None
        self.num_prompt_tokens = num_prompt_tokens
        asked = settings.sampling_params.max_new_tokens if settings.sampling_params else msgspec.UNSET
        self.asked_tokens = None if asked is msgspec.UNSET else asked
        """`max_new_tokens` as the caller said it; None where the engine decides, within its context."""
        self.max_new_tokens = DEFAULT_MAX_NEW_TOKENS if asked is msgspec.UNSET else asked

    @property
    def fields(self) -> dict[str, Any]:
        """All fields, decoded."""
        if self._fields is None:
            fields: dict[str, Any] = msgspec.json.decode(self._body)
            fields["sampling_params"] = {"max_new_tokens": DEFAULT_MAX_NEW_TOKENS} | (fields.get("sampling_params") or {})
            self._fields = fields
        return self._fields

    def attempt(self, *, rid: str, namespace: str) -> bytes:
        """The body for an engine: the caller's own bytes with the hub's fields after them, where the caller has not set those."""
        if self._is_plain:
            return b'%b,"rid":"%b","return_logprob":true,"extra_key":%b}' % (
                self._body[: self._body.rindex(b"}")],
                rid.encode(),
                msgspec.json.encode(namespace),
            )
        return msgspec.json.encode(self.fields | self.hub_fields(rid=rid, namespace=namespace))

    def hub_fields(self, *, rid: str, namespace: str) -> dict[str, Any]:
        key = self._extra_key
        return {"rid": rid, "return_logprob": True, "extra_key": namespace if key is None else f"{namespace}:{key}"}


def parse_request(body: bytes, vocabulary: int | None = None) -> Request:
    """The request in `body`. Raises: RefusedError, 400 if it is not JSON and 422 if no engine could answer it.

    Args: vocabulary: ids of the engines' tokens are below it; None if they have not said. SGLang does not look at ids, and dies of
    one that its model lacks.
    """
    try:
        settings = _decoder(vocabulary).decode(body)
    except msgspec.ValidationError as error:
        raise _misfit(body, vocabulary, error) from error
    except UNDECODABLE as error:
        raise RefusedError(400, f"the body of POST /generate must be JSON, got something else: {error}") from error
    if settings.stream:
        raise RefusedError(422, "stream must be false: the hub answers when the call is complete; leave it out")
    if settings.sampling_params is not None and settings.sampling_params.n != 1:
        raise RefusedError(422, f"sampling_params.n must be 1, got {settings.sampling_params.n}; send each sample as its own call")
    request = Request(body, settings, len(settings.input_ids))
    if request.asked_tokens is not None and request.asked_tokens < 0:
        raise RefusedError(
            422, f"sampling_params.max_new_tokens must be >= 0, got {request.asked_tokens}; leave it out for SGLang's own"
        )
    return request


def _misfit(body: bytes, vocabulary: int | None, error: msgspec.ValidationError) -> RefusedError:
    """What is wrong with a body that is JSON."""
    try:
        ids = _any_ids_decoder.decode(body).input_ids
    except UNDECODABLE:  # What follows the misfit may be no JSON at all.
        ids = []
    unknown = next(((index, token) for index, token in enumerate(ids) if vocabulary is not None and token >= vocabulary), None)
    if unknown is not None:
        return RefusedError(
            422,
            f"input_ids must hold token ids below {vocabulary}, the size of the engines' vocabulary, got {unknown[1]} at index "
            f"{unknown[0]}; use the tokenizer of the model that the engines serve",
        )
    if ids:
        return RefusedError(422, f"a field of POST /generate does not fit: {error}; /docs shows what it takes")
    return RefusedError(
        422,
        f"POST /generate takes the token ids of one prompt in input_ids, got a body that does not fit: {error}; "
        "tokenize text before sending it, and send each prompt as its own call",
    )


def cache_namespace(epoch: str, version: int) -> str:
    """Prefix of `extra_key` that keeps prompts cached under other weights apart, even if a later lineage reuses their version."""
    return f"{epoch}:{version}"


class Call:
    """One caller's request, over the attempts it takes."""

    def __init__(self, request: Request, *, max_attempts: int, segment_tokens: int | None = None) -> None:
        """Args: segment_tokens: an attempt samples at most so many, and the next one goes on from them: what an engine that dies
        takes with it. None: all in one."""
        self._request = request
        self._max_attempts = max_attempts
        self._parts: list[answers.Answer] = []
        self._received_ids: list[int] = []
        self._failures: list[str] = []
        self._num_fruitless = 0
        self._segment_tokens = segment_tokens
        self._is_segment = False
        """The attempt under way ends before the caller's own limit."""
        self.is_between_segments = False
        """The last answer was whole, and not the last one."""
        self.failed_engine_ids: set[str] = set()
        self.last_engine_id: str | None = None
        """Whose cache holds the tokens so far."""
        self.num_attempts = 0
        self.waited_s = 0.0
        """For an engine, a weight update, or after failures."""
        self.engine_s = 0.0
        """In attempts, failed ones too."""

    @property
    def num_received_tokens(self) -> int:
        """Output tokens that earlier attempts left behind and this call keeps."""
        return len(self._received_ids)

    @property
    def prompt_tokens(self) -> int:
        return self._request.num_prompt_tokens

    @property
    def cost_tokens(self) -> int:
        """Upper bound of the tokens an engine has to prefill and sample for the next attempt."""
        max_new_tokens = self._request.max_new_tokens
        return self._request.num_prompt_tokens + (DEFAULT_MAX_NEW_TOKENS if max_new_tokens is None else max_new_tokens)

    @property
    def delay_s(self) -> float:
        """Seconds to wait before the next attempt: none, until attempts in a row brought no token."""
        return min(MAX_DELAY_S, FIRST_DELAY_S * 2 ** (self._num_fruitless - 1)) if self._num_fruitless else 0.0

    @property
    def history(self) -> str:
        """What was tried, for an error."""
        return "; ".join(self._failures) if self._failures else "no engine could be tried"

    def begin(self, *, rid: str, epoch: str, version: int) -> bytes:
        """The body of the next attempt."""
        self.num_attempts += 1
        namespace = cache_namespace(epoch, version)
        self.is_between_segments = False
        self._is_segment = self._must_segment()
        if not self._received_ids and not self._is_segment:
            return self._request.attempt(rid=rid, namespace=namespace)
        fields = self._request.fields
        attempt = fields | self._request.hub_fields(rid=rid, namespace=namespace)
        at_most = self._segment_tokens if self._is_segment else None
        attempt["sampling_params"] = _remaining(fields["sampling_params"], len(self._received_ids), at_most=at_most)
        if self._received_ids:
            attempt["input_ids"] = fields["input_ids"] + self._received_ids
            attempt["logprob_start_len"] = -1
        return msgspec.json.encode(attempt)

    def answered(self, engine_id: str, status: int, body: bytes, *, has_early_labels: bool = False) -> Reply | None:
        """Takes an engine's answer. Returns the reply, or None if another attempt is needed.

        Args: has_early_labels: its version labels change one token early, see `answer.date_back`.
        """
        if 400 <= status < 500:
            return Reply(status, body)
        if status != 200:
            return self.failed(engine_id, f"engine {engine_id} answered status {status}")
        try:
            head = answers.head_of(body)
        except UNDECODABLE as error:
            return self.failed(engine_id, f"engine {engine_id} answered something that is no SGLang answer: {error}")
        self.is_between_segments = self._is_segment and head.has_reached_length
        must_date_back = has_early_labels and head.is_mixed
        if not (head.is_partial or self._parts or must_date_back or self.is_between_segments):
            meta = head.meta_info
            return Reply(status, body, meta.completion_tokens, meta.cached_tokens, meta.num_retractions, meta.first_token_latency)
        answer = msgspec.json.decode(body)
        if must_date_back:
            answer = answers.date_back(answer)
        is_partial = head.is_partial or self.is_between_segments
        return self._partial(answer) if is_partial else self._finished(engine_id, answer)

    def failed(self, engine_id: str, reason: str) -> Reply | None:
        """Takes a lost connection or a server error: nothing was received. Returns the reply if it was one too many."""
        self.failed_engine_ids.add(engine_id)
        self._failures.append(reason)
        self._num_fruitless += 1
        if len(self._failures) < self._max_attempts:
            return None
        return error_reply(
            502,
            f"a generate call may fail on at most {self._max_attempts} attempts (inference_hub.max_attempts), and this one did: "
            f"{self.history}; see the engines' logs",
        )

    def unreached(self, engine_id: str) -> None:
        """Takes a refused connection: the engine never saw this call, so it does not count as one of its failures."""
        self.failed_engine_ids.add(engine_id)
        self._num_fruitless += 1

    def _must_segment(self) -> bool:
        max_new_tokens = self._request.max_new_tokens
        if self._segment_tokens is None or not self._is_joinable:
            return False
        return max_new_tokens is None or max_new_tokens - len(self._received_ids) > self._segment_tokens

    @property
    def _is_joinable(self) -> bool:
        return not any(self._request.fields.get(key) for key in NOT_JOINABLE)

    def _partial(self, answer: answers.Answer) -> Reply | None:
        part = answers.trustworthy_part(answer) if self._is_joinable else None
        if part is None:
            self._num_fruitless += 1
            return None
        self._num_fruitless = 0
        self._parts.append(part)
        self._received_ids += part["output_ids"]
        max_new_tokens = self._request.max_new_tokens
        if max_new_tokens is not None and len(self._received_ids) >= max_new_tokens:
            return self._joined(self._parts, {"type": "length"})
        return None

    def _finished(self, engine_id: str, answer: answers.Answer) -> Reply | None:
        part = answers.trustworthy_part(answer)
        if len(answer["output_ids"]) != (len(part["output_ids"]) if part else 0):
            return self.failed(engine_id, f"engine {engine_id} answered tokens without log-probabilities or versions")
        if not self._parts:
            return Reply(200, msgspec.json.encode(answer), len(answer["output_ids"]))
        return self._joined([*self._parts, part] if part else self._parts, answer["meta_info"]["finish_reason"])

    def _joined(self, parts: list[answers.Answer], finish_reason: Mapping[str, Any]) -> Reply:
        joined = answers.join(parts, prompt_tokens=self._request.num_prompt_tokens, finish_reason=finish_reason)
        return Reply(200, msgspec.json.encode(joined), len(joined["output_ids"]))


def body_too_large(max_body_bytes: int) -> Reply:
    return error_reply(
        413,
        f"the body of POST /generate must be at most {max_body_bytes} bytes (inference_hub.max_body_bytes), got more; send each "
        "prompt as its own call",
    )


def error_reply(status: int, sentence: str, *, headers: tuple[tuple[str, str], ...] = ()) -> Reply:
    return Reply(status, msgspec.json.encode({"detail": sentence}), headers=headers)


def _remaining(sampling: Mapping[str, Any], num_received: int, *, at_most: int | None) -> dict[str, Any]:
    """Sampling parameters of a continuation after `num_received` tokens, for `at_most` tokens more."""
    remaining = dict(sampling)
    if sampling["max_new_tokens"] is not None:
        remaining["max_new_tokens"] = sampling["max_new_tokens"] - num_received
    if sampling.get("min_new_tokens"):
        remaining["min_new_tokens"] = max(0, sampling["min_new_tokens"] - num_received)
    if at_most is not None:
        remaining["max_new_tokens"] = at_most
        if "min_new_tokens" in remaining:
            remaining["min_new_tokens"] = min(at_most, remaining["min_new_tokens"] or 0)
    return remaining
