from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.inference_hub.resume import Call, RefusedError, Reply, cache_namespace, parse_request

PROMPT = [1, 2, 3]


def call(max_attempts: int = 4, max_new_tokens: int | None = 6, segment_tokens: int | None = None, **fields: Any) -> Call:
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": max_new_tokens}} | fields
    return Call(parse_request(msgspec.json.encode(body)), max_attempts=max_attempts, segment_tokens=segment_tokens)


def begin(call: Call) -> dict[str, Any]:
    return msgspec.json.decode(call.begin(rid="r" * 32, epoch="e1", version=2))


def counted(attempt: dict[str, Any], length: int, reason: str, version: str = "2") -> bytes:
    """An answer of a policy whose next token is always the last one plus one."""
    ids = [attempt["input_ids"][-1] + 1 + i for i in range(length)]
    meta = {"finish_reason": {"type": reason}, "completion_tokens": length}
    meta["output_token_logprobs"] = [[-token / 1000, token, None] for token in ids]
    meta["weight_versions"] = [{"version": version, "start": 0, "end": length}]
    return msgspec.json.encode({"output_ids": ids, "meta_info": meta})


def test_a_complete_answer_is_relayed_byte_for_byte():
    body = b' {"output_ids":[4], "meta_info":{"finish_reason":{"type":"stop"},"completion_tokens":1,"new":[1]}} '
    attempt = call()
    begin(attempt)
    assert attempt.answered("e", 200, body) == Reply(200, body, 1)


def test_the_hub_sets_what_the_trainer_needs():
    attempt = begin(call(extra_key="mine", top_logprobs_num=2))
    assert attempt["return_logprob"] is True
    assert attempt["extra_key"] == "e1:2:mine"
    assert attempt["top_logprobs_num"] == 2
    assert attempt["rid"] == "r" * 32


def test_namespaces_of_different_lineages_differ():
    assert len({cache_namespace("a", 1), cache_namespace("b", 1), cache_namespace("a", 2)}) == 3


def test_an_aborted_call_goes_on_where_it_stopped():
    this = call()
    assert this.answered("e", 200, counted(begin(this), 2, "abort")) is None
    attempt = begin(this)
    assert attempt["input_ids"] == [1, 2, 3, 4, 5]
    assert attempt["sampling_params"]["max_new_tokens"] == 4
    reply = this.answered("e", 200, counted(attempt, 4, "length", version="3"))
    assert reply is not None
    joined = msgspec.json.decode(reply.body)
    assert joined["output_ids"] == [4, 5, 6, 7, 8, 9]
    assert joined["meta_info"]["weight_versions"] == [
        {"version": "2", "start": 0, "end": 2},
        {"version": "3", "start": 2, "end": 6},
    ]


def test_a_continuation_needs_fewer_tokens_at_least_too():
    this = Call(
        parse_request(msgspec.json.encode({"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 6, "min_new_tokens": 3}})),
        max_attempts=1,
    )
    this.answered("e", 200, counted(begin(this), 2, "abort"))
    assert begin(this)["sampling_params"]["min_new_tokens"] == 1


def test_an_answer_with_early_labels_is_dated_back():
    this = call()
    body = msgspec.json.decode(counted(begin(this), 6, "length"))
    body["meta_info"]["weight_versions"] = [{"version": "1", "start": 0, "end": 2}, {"version": "2", "start": 2, "end": 6}]
    exact = this.answered("e", 200, msgspec.json.encode(body))
    dated = call().answered("e", 200, msgspec.json.encode(body), has_early_labels=True)
    assert exact is not None
    assert dated is not None
    assert msgspec.json.decode(exact.body)["meta_info"]["weight_versions"][0]["end"] == 2
    assert msgspec.json.decode(dated.body)["meta_info"]["weight_versions"][0]["end"] == 3


def test_a_long_call_is_asked_for_in_segments_and_loses_only_one():
    this = call(max_new_tokens=5, segment_tokens=2, min_new_tokens=None)
    assert this.answered("e", 200, counted(begin(this), 2, "length")) is None
    assert this.is_between_segments
    assert this.delay_s == 0
    attempt = begin(this)
    assert (attempt["input_ids"], attempt["sampling_params"]["max_new_tokens"]) == ([*PROMPT, 4, 5], 2)
    assert this.failed("e", "engine e died") is None
    attempt = begin(this)
    assert attempt["input_ids"] == [*PROMPT, 4, 5]
    assert this.answered("f", 200, counted(attempt, 2, "length")) is None
    attempt = begin(this)
    assert (attempt["input_ids"], attempt["sampling_params"]["max_new_tokens"]) == ([*PROMPT, 4, 5, 6, 7], 1)
    reply = this.answered("f", 200, counted(attempt, 1, "length"))
    assert reply is not None
    joined = msgspec.json.decode(reply.body)
    assert joined["output_ids"] == [4, 5, 6, 7, 8]
    assert joined["meta_info"]["finish_reason"] == {"type": "length", "length": 5}


def test_a_segment_that_ends_by_a_stop_token_ends_the_call():
    this = call(max_new_tokens=5, segment_tokens=2)
    assert this.answered("e", 200, counted(begin(this), 1, "stop")) is not None


def test_a_call_aborted_at_its_last_token_is_complete():
    this = call(max_new_tokens=2)
    reply = this.answered("e", 200, counted(begin(this), 2, "abort"))
    assert reply is not None
    assert msgspec.json.decode(reply.body)["meta_info"]["finish_reason"] == {"type": "length", "length": 2}


def test_a_cut_call_begins_again_elsewhere():
    this = call()
    begin(this)
    assert this.failed("e1", "engine e1 died") is None
    assert begin(this)["input_ids"] == PROMPT
    assert this.failed_engine_ids == {"e1"}


def test_a_call_that_kills_engines_comes_back_with_what_was_tried():
    this = call(max_attempts=2)
    assert this.failed("e1", "engine e1 died") is None
    reply = this.failed("e2", "engine e2 died")
    assert reply is not None
    assert reply.status == 502
    assert b"engine e1 died; engine e2 died" in reply.body


def test_an_engine_that_was_never_reached_is_not_counted():
    this = call(max_attempts=1)
    for _ in range(10):
        this.unreached("e1")
    assert this.answered("e2", 200, counted(begin(this), 6, "length")) is not None


def test_a_refusal_is_passed_on():
    assert call().answered("e", 400, b'{"error":"unknown field"}') == Reply(400, b'{"error":"unknown field"}')


@pytest.mark.parametrize(("status", "body"), [(500, b"oops"), (503, b""), (200, b"<html>"), (200, b"{}")])
def test_a_broken_answer_is_tried_again(status: int, body: bytes):
    assert call().answered("e", status, body) is None


def test_attempts_without_a_token_wait_longer_and_longer():
    this = call()
    delays = [this.delay_s]
    for _ in range(8):
        this.answered("e", 200, counted({"input_ids": [3]}, 0, "abort"))
        delays.append(this.delay_s)
    assert delays[0] == 0
    assert delays == sorted(delays)
    assert delays[-1] == 1.0
    this.answered("e", 200, counted({"input_ids": [3]}, 1, "abort"))
    assert this.delay_s == 0


def test_what_cannot_be_joined_is_sampled_again():
    this = call(return_routed_experts=True)
    assert this.answered("e", 200, counted(begin(this), 2, "abort")) is None
    assert begin(this)["input_ids"] == PROMPT


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"{", 400, "must be JSON"),
        (b'{"input_ids": [1], "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400, "must be JSON"),
        (b'{"input_ids": [1000], "x": [', 422, "input_ids"),
        (b'"hello"', 422, "token ids of one prompt"),
        (b'{"text": "hello"}', 422, "missing required field `input_ids`"),
        (b'{"input_ids": []}', 422, "input_ids"),
        (b'{"input_ids": [-1]}', 422, "input_ids"),
        (b'{"input_ids": [[1], [2]]}', 422, "input_ids"),
        (b'{"input_ids": [1], "stream": true}', 422, "stream must be false"),
        (b'{"input_ids": [1], "sampling_params": {"n": 2}}', 422, "n must be 1, got 2"),
        (b'{"input_ids": [1], "sampling_params": {"max_new_tokens": -2}}', 422, "max_new_tokens"),
    ],
)
def test_a_request_the_hub_cannot_route_gets_a_sentence(body: bytes, status: int, words: str):
    with pytest.raises(RefusedError, match=words) as caught:
        parse_request(body, vocabulary=1000)
    assert caught.value.status == status


@dataclass(frozen=True)
class Event:
    """What an engine does with an attempt."""

    kind: str
    num_tokens: int = 0
    version: int = 0


events = st.one_of(
    st.builds(Event, st.just("abort"), st.integers(0, 5), st.integers(0, 3)),
    st.builds(Event, st.sampled_from(["cut", "unreached", "error", "garbage"])),
)


@given(st.lists(events, max_size=20), st.integers(1, 12), st.none() | st.integers(1, 12))
def test_whatever_happens_a_call_is_answered_once_with_exactly_its_tokens(
    history: list[Event], max_new_tokens: int, segment_tokens: int | None
):
    this = call(max_attempts=1_000, max_new_tokens=max_new_tokens, segment_tokens=segment_tokens)
    versions: list[int] = []
    replies = []
    for event in [*history, *[Event("finish", version=9)] * max_new_tokens]:
        attempt = begin(this)
        left = attempt["sampling_params"]["max_new_tokens"]
        num_before = len(attempt["input_ids"]) - len(PROMPT)
        assert attempt["input_ids"] == PROMPT + [4 + i for i in range(num_before)]
        assert left == min(max_new_tokens - num_before, segment_tokens or max_new_tokens)
        assert num_before == len(versions)
        length = left if event.kind == "finish" else min(event.num_tokens, left)
        reply: Reply | None = None
        match event.kind:
            case "abort" | "finish":
                versions += [event.version] * length
                reason = "length" if event.kind == "finish" else "abort"
                reply = this.answered("e", 200, counted(attempt, length, reason, str(event.version)))
            case "cut":
                reply = this.failed("e", "cut")
            case "unreached":
                this.unreached("e")
            case "error":
                reply = this.answered("e", 500, b"")
            case "garbage":
                reply = this.answered("e", 200, b"?")
        if reply is not None:
            replies.append(reply)
            break
    assert len(replies) == 1
    answer = msgspec.json.decode(replies[0].body)
    assert answer["output_ids"] == [4 + i for i in range(max_new_tokens)]
    assert answer["meta_info"]["output_token_logprobs"] == [[-token / 1000, token, None] for token in answer["output_ids"]]
    spans = answer["meta_info"]["weight_versions"]
    assert [int(span["version"]) for span in spans for _ in range(span["start"], span["end"])] == versions
    assert [span["start"] for span in spans] == [0, *(span["end"] for span in spans[:-1])]


@given(
    st.lists(st.integers(0, 2**31), min_size=1, max_size=20),
    st.sampled_from([None, True, False]),
    st.sampled_from([None, "mine"]),
    st.sampled_from(["", " ", "\n"]),
)
def test_an_attempt_is_the_callers_request_with_the_hubs_fields(prompt, return_logprob, key, space):
    given_fields = {"input_ids": prompt, "custom": {"a": [1, {}]}, "sampling_params": {"max_new_tokens": 3}}
    given_fields |= {} if return_logprob is None else {"return_logprob": return_logprob}
    given_fields |= {} if key is None else {"extra_key": key}
    body = msgspec.json.format(msgspec.json.encode(given_fields), indent=len(space)) + space.encode()
    this = Call(parse_request(body), max_attempts=1)
    assert this.cost_tokens == len(prompt) + 3
    hub_fields = {"rid": "r" * 32, "return_logprob": True, "extra_key": "e1:2" if key is None else f"e1:2:{key}"}
    assert begin(this) == given_fields | hub_fields
