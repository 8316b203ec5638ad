"""SGLang's answers to `/generate`: what they say about their end, and how partial ones join into one.

A joined answer is what one uninterrupted call would have answered: output ids and log-probabilities in order, and version spans
that cover every output token.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from shared.versions import VersionSpan, merge_spans, shift_spans, version_of_label

PER_TOKEN_KEYS: Final = ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs")
FIRST_KEYS: Final = (
    "cached_tokens",
    "input_token_logprobs",
    "input_top_logprobs",
    "input_token_ids_logprobs",
    "request_received_ts",
    "first_token_latency",
)
"""Of a joined answer's first part."""
SUMMED_KEYS: Final = ("reasoning_tokens", "num_retractions", "e2e_latency")

Answer = dict[str, Any]
"""A whole decoded answer: `output_ids`, `meta_info`, and `text` if the engine has a tokenizer."""


class FinishReason(msgspec.Struct, frozen=True):
    type: str


class MetaHead(msgspec.Struct, frozen=True):
    finish_reason: FinishReason | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    num_retractions: int = 0
    first_token_latency: float | None = None
    """Seconds from the request's arrival at the engine; only with --enable-metrics."""
    weight_versions: list[msgspec.Raw] = []


class AnswerHead(msgspec.Struct, frozen=True):
    """The few fields that decide what happens to an answer, decoded without the rest."""

    meta_info: MetaHead

    @property
    def is_partial(self) -> bool:
        """The engine stopped before the request's own end."""
        reason = self.meta_info.finish_reason
        return reason is None or reason.type == "abort"

    @property
    def has_reached_length(self) -> bool:
        """It has as many tokens as were asked for."""
        reason = self.meta_info.finish_reason
        return reason is not None and reason.type == "length"

    @property
    def is_mixed(self) -> bool:
        """More than one policy version sampled it."""
        return len(self.meta_info.weight_versions) > 1


_head_decoder = msgspec.json.Decoder(AnswerHead)
_META_KEY: Final = b'"meta_info":'
_LOGPROBS_KEY: Final = b'"output_token_logprobs":[['
_LOGPROBS_END: Final = b"]]"


def head_of(body: bytes) -> AnswerHead:
    """Raises: msgspec.DecodeError if `body` is no answer to a generate call."""
    try:
        head = _head_decoder.decode(_without_logprobs(body))
    except msgspec.DecodeError:
        return _head_decoder.decode(body)
    return head if head.meta_info.weight_versions else _head_decoder.decode(body)


def _without_logprobs(body: bytes) -> bytes:
    """`body` from its meta_info on and without the list that most of it is: a small JSON object, or something else that does not
    decode, if the engine's answer has another form.

    Quotes inside a JSON string are escaped, so a key with its quotes is found nowhere else.
    """
    start, logprobs, end = body.find(_META_KEY), body.find(_LOGPROBS_KEY), body.rfind(_LOGPROBS_END)
    if not 0 <= start < logprobs < end:
        return body
    return b'{%b"output_token_logprobs":0%b' % (body[start:logprobs], body[end + len(_LOGPROBS_END) :])


def date_back(answer: Answer) -> Answer:
    """The answer with each change of version one token later: an upper bound of every token's age.

    With overlapped scheduling SGLang keeps one sampled token of each request unprocessed while it is paused in place, and labels
    it with the version that was loaded meanwhile, although the weights before it sampled it.
    """
    spans = _spans(answer["meta_info"])
    if not spans:
        return answer
    length = spans[-1].end
    starts = [spans[0].start, *(min(span.start + 1, length) for span in spans[1:])]
    ends = [*starts[1:], length]
    dated = [VersionSpan(start, end, span.version) for start, end, span in zip(starts, ends, spans, strict=True)]
    return answer | {"meta_info": answer["meta_info"] | {"weight_versions": _wire_spans(merge_spans(dated))}}


def trustworthy_part(answer: Answer) -> Answer | None:
    """The leading output tokens that have an id, a log-probability and a policy version; None if there are none.

    Only these may be kept from a partial answer: a token that lacks one of them is sampled again.
    """
    meta_info = answer["meta_info"]
    spans = _spans(meta_info)
    if spans is None:
        return None
    covered = spans[-1].end if spans else 0
    length = min(len(answer["output_ids"]), len(meta_info.get("output_token_logprobs", ())), covered)
    if length == 0:
        return None
    kept = {key: meta_info[key][:length] for key in PER_TOKEN_KEYS if meta_info.get(key)}
    clipped = [VersionSpan(span.start, min(span.end, length), span.version) for span in spans if span.start < length]
    return answer | {
        "output_ids": answer["output_ids"][:length],
        "meta_info": meta_info | kept | {"weight_versions": _wire_spans(clipped)},
    }


def join(parts: Sequence[Answer], *, prompt_tokens: int, finish_reason: Mapping[str, Any]) -> Answer:
    """One answer out of partial ones, each of which continued after the last token of the one before.

    Args: parts: trustworthy, at least one. prompt_tokens: length of the caller's own prompt. finish_reason: how the last one ended.
    """
    first, last = parts[0], parts[-1]
    output_ids = [token for part in parts for token in part["output_ids"]]
    whole_length = {"length": len(output_ids)} if finish_reason["type"] == "length" else {}
    metas = [part["meta_info"] for part in parts]
    meta_info = dict(last["meta_info"])
    meta_info |= {key: first["meta_info"][key] for key in FIRST_KEYS if key in first["meta_info"]}
    per_token = [key for key in PER_TOKEN_KEYS if all(meta.get(key) for meta in metas)]
    meta_info |= {key: [item for meta in metas for item in meta[key]] for key in per_token}
    meta_info |= {key: sum(meta.get(key) or 0 for meta in metas) for key in SUMMED_KEYS if key in meta_info}
    meta_info |= {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": len(output_ids),
        "output_token_logprobs_length": len(output_ids),
        "finish_reason": {**finish_reason, **whole_length},
        "weight_versions": _wire_spans(_joined_spans(parts)),
    }
    joined = last | {"output_ids": output_ids, "meta_info": meta_info}
    if "text" in last:
        joined["text"] = "".join(part.get("text", "") for part in parts)
    return joined


def _joined_spans(parts: Sequence[Answer]) -> tuple[VersionSpan, ...]:
    spans: list[VersionSpan] = []
    offset = 0
    for part in parts:
        spans += shift_spans(_spans(part["meta_info"]) or (), offset)
        offset += len(part["output_ids"])
    return merge_spans(spans)


def _spans(meta_info: Mapping[str, Any]) -> list[VersionSpan] | None:
    """The engine's version spans; None if a label is not a policy version."""
    spans = []
    for span in meta_info.get("weight_versions") or ():
        version = version_of_label(span["version"])
        if version is None:
            return None
        spans.append(VersionSpan(span["start"], span["end"], version))
    return spans


def _wire_spans(spans: Iterable[VersionSpan]) -> list[dict[str, Any]]:
    return [{"version": str(span.version), "start": span.start, "end": span.end} for span in spans]
