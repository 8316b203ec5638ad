"""What happens to a call after each attempt: done, go on where it stopped, or begin again elsewhere. Pure decisions.

    WAITING ──begin──► TRYING ──answer──► ANSWERED
       ▲                 │
       └──cut or abort───┘

A call that an engine aborted goes on with its tokens so far appended to the prompt. One whose connection was cut received
nothing and begins again. Only refusals (4xx) and calls that fail on `max_attempts` engines come back to the caller as errors.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from services.inference_hub import answer as answers

DEFAULT_MAX_NEW_TOKENS: Final = 128
"""SGLang's own, when a request does not say."""
MAX_BODY_BYTES: Final = 16 * 2**20
NOT_JOINABLE: Final = ("return_hidden_states", "return_routed_experts", "return_indexer_topk", "return_sampling_mask")
"""Per-token data in forms that do not concatenate: a request that asks for it begins again instead of going on."""
FIRST_DELAY_S: Final = 0.05
MAX_DELAY_S: Final = 1.0

TokenId = Annotated[int, Meta(ge=0)]


class RefusedError(Exception):
    """A request the hub answers itself, with a 4xx status and a sentence."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class Reply(msgspec.Struct, frozen=True):
    """What goes back to the caller."""

    status: int
    body: bytes
    num_tokens: int = 0
    """Output tokens in a 200."""


class _Sampling(msgspec.Struct, frozen=True):
    max_new_tokens: Annotated[int, Meta(ge=0)] | None = DEFAULT_MAX_NEW_TOKENS
    n: int = 1


class _Checked(msgspec.Struct, frozen=True):
    """The fields of a request that the hub relies on; the others are the engine's business."""

    input_ids: Annotated[list[TokenId], Meta(min_length=1)]
    sampling_params: _Sampling | None = None
    stream: bool = False
    extra_key: str | None = None


_checked_decoder = msgspec.json.Decoder(_Checked)


def parse_request(body: bytes) -> dict[str, Any]:
    """The request in `body`, all its fields. Raises: RefusedError, 400 if it is not JSON and 422 if the hub cannot route it."""
    try:
        checked = _checked_decoder.decode(body)
    except msgspec.ValidationError as error:
        raise RefusedError(
            422,
            f"POST /generate takes the token ids of one prompt in input_ids, got a body that does not fit: {error}; "
            "tokenize text before sending it, and send each prompt as its own call",
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RefusedError(400, f"the body of POST /generate must be JSON, got something else: {error}") from error
    if checked.stream:
        raise RefusedError(422, "stream must be false: the hub answers when the call is complete; leave it out")
    if checked.sampling_params is not None and checked.sampling_params.n != 1:
        raise RefusedError(422, f"sampling_params.n must be 1, got {checked.sampling_params.n}; send each sample as its own call")
    request: dict[str, Any] = msgspec.json.decode(body)
    request["sampling_params"] = {"max_new_tokens": DEFAULT_MAX_NEW_TOKENS} | (request.get("sampling_params") or {})
    return request


def cache_namespace(epoch: str, version: int, callers_key: str | None) -> str:
    """`extra_key` that keeps prompts cached under other weights apart, even if a later lineage reuses their version."""
    namespace = f"{epoch}:{version}"
    return namespace if callers_key is None else f"{namespace}:{callers_key}"


class Call:
    """One caller's request, over the attempts it takes."""

    def __init__(self, request: dict[str, Any], *, max_attempts: int) -> None:
        self._request = request
        self._max_attempts = max_attempts
        self._parts: list[answers.Answer] = []
        self._received_ids: list[int] = []
        self._failures: list[str] = []
        self._num_fruitless = 0
        self.failed_engine_ids: set[str] = set()
        self.num_attempts = 0

    @property
    def num_received_tokens(self) -> int:
        """Output tokens that earlier attempts left behind and this call keeps."""
        return len(self._received_ids)

    @property
    def cost_tokens(self) -> int:
        """Upper bound of the tokens an engine has to prefill and sample for the next attempt."""
        max_new_tokens = self._request["sampling_params"]["max_new_tokens"]
        return len(self._request["input_ids"]) + (DEFAULT_MAX_NEW_TOKENS if max_new_tokens is None else max_new_tokens)

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
        attempt = self._request | {
            "rid": rid,
            "return_logprob": True,
            "extra_key": cache_namespace(epoch, version, self._request.get("extra_key")),
        }
        if self._received_ids:
            attempt["input_ids"] = self._request["input_ids"] + self._received_ids
            attempt["sampling_params"] = _remaining(self._request["sampling_params"], len(self._received_ids))
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
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return self.failed(engine_id, f"engine {engine_id} answered something that is no SGLang answer: {error}")
        must_date_back = has_early_labels and head.is_mixed
        if not (head.is_partial or self._parts or must_date_back):
            return Reply(status, body, head.meta_info.completion_tokens)
        answer = msgspec.json.decode(body)
        if must_date_back:
            answer = answers.date_back(answer)
        return self._aborted(answer) if head.is_partial else self._finished(engine_id, answer)

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

    def _aborted(self, answer: answers.Answer) -> Reply | None:
        part = None if any(self._request.get(key) for key in NOT_JOINABLE) else answers.trustworthy_part(answer)
        if part is None:
            self._num_fruitless += 1
            return None
        self._num_fruitless = 0
        self._parts.append(part)
        self._received_ids += part["output_ids"]
        max_new_tokens = self._request["sampling_params"]["max_new_tokens"]
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
        joined = answers.join(parts, prompt_tokens=len(self._request["input_ids"]), finish_reason=finish_reason)
        return Reply(200, msgspec.json.encode(joined), len(joined["output_ids"]))


def error_reply(status: int, sentence: str) -> Reply:
    return Reply(status, msgspec.json.encode({"detail": sentence}))


def _remaining(sampling: Mapping[str, Any], num_received: int) -> dict[str, Any]:
    """Sampling parameters of a continuation after `num_received` tokens."""
    remaining = dict(sampling)
    if sampling["max_new_tokens"] is not None:
        remaining["max_new_tokens"] = sampling["max_new_tokens"] - num_received
    if sampling.get("min_new_tokens"):
        remaining["min_new_tokens"] = max(0, sampling["min_new_tokens"] - num_received)
    return remaining
