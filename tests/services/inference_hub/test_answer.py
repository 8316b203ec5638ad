from typing import Any

import msgspec
import pytest

from services.inference_hub.answer import date_back, head_of, join, trustworthy_part


def answer(ids: list[int], version: str = "3", **meta: Any) -> dict[str, Any]:
    spans = [{"version": version, "start": 0, "end": len(ids)}]
    logprobs = [[-id_ / 10, id_, None] for id_ in ids]
    return {
        "text": "x" * len(ids),
        "output_ids": ids,
        "meta_info": {"output_token_logprobs": logprobs, "weight_versions": spans, "completion_tokens": len(ids)} | meta,
    }


def test_joined_answers_have_all_tokens_logprobs_and_versions_in_order():
    parts = [
        answer([7, 8], "3", cached_tokens=5, e2e_latency=1.0),
        answer([9], "3", e2e_latency=0.5),
        answer([10, 11], "4", e2e_latency=2.0),
    ]
    joined = join(parts, prompt_tokens=6, finish_reason={"type": "stop", "matched": 11})
    meta = joined["meta_info"]
    assert joined["output_ids"] == [7, 8, 9, 10, 11]
    assert [entry[1] for entry in meta["output_token_logprobs"]] == joined["output_ids"]
    assert [entry[0] for entry in meta["output_token_logprobs"]] == [-0.7, -0.8, -0.9, -1.0, -1.1]
    assert meta["weight_versions"] == [{"version": "3", "start": 0, "end": 3}, {"version": "4", "start": 3, "end": 5}]
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["e2e_latency"]) == (6, 5, 3.5)
    assert joined["text"] == "xxxxx"
    assert meta["finish_reason"] == {"type": "stop", "matched": 11}


def test_prompt_facts_come_from_the_first_attempt():
    parts = [
        answer([7], cached_tokens=0, input_token_logprobs=[[None, 1, None]]),
        answer([8], cached_tokens=9, input_token_logprobs=[]),
    ]
    meta = join(parts, prompt_tokens=1, finish_reason={"type": "stop"})["meta_info"]
    assert meta["cached_tokens"] == 0
    assert meta["input_token_logprobs"] == [[None, 1, None]]


def test_top_logprobs_are_joined_if_every_part_has_them():
    parts = [answer([7], output_top_logprobs=[["a"]]), answer([8, 9], output_top_logprobs=[["b"], ["c"]])]
    assert join(parts, prompt_tokens=1, finish_reason={"type": "stop"})["meta_info"]["output_top_logprobs"] == [["a"], ["b"], ["c"]]


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        ({}, 3),
        ({"output_token_logprobs": [[-0.7, 7, None]]}, 1),
        ({"weight_versions": [{"version": "3", "start": 0, "end": 2}]}, 2),
        ({"weight_versions": []}, 0),
        ({"output_token_logprobs": []}, 0),
        ({"weight_versions": [{"version": "mystery", "start": 0, "end": 3}]}, 0),
    ],
)
def test_only_tokens_with_a_logprob_and_a_version_are_kept(change: dict[str, Any], kept: int):
    part = trustworthy_part(answer([7, 8, 9]) | {"meta_info": answer([7, 8, 9])["meta_info"] | change})
    assert (len(part["output_ids"]) if part else 0) == kept
    if part:
        assert len(part["meta_info"]["output_token_logprobs"]) == kept
        assert part["meta_info"]["weight_versions"][-1]["end"] == kept


def test_a_request_aborted_in_the_queue_has_nothing_to_keep():
    assert trustworthy_part({"output_ids": [], "meta_info": {"finish_reason": {"type": "abort"}}}) is None


@pytest.mark.parametrize(
    ("spans", "dated"),
    [
        ([(0, 3, 1), (3, 6, 2)], [(0, 4, 1), (4, 6, 2)]),
        ([(0, 3, 1), (3, 4, 2), (4, 9, 3)], [(0, 4, 1), (4, 5, 2), (5, 9, 3)]),
        ([(0, 5, 1), (5, 6, 2)], [(0, 6, 1)]),
        ([(0, 6, 1)], [(0, 6, 1)]),
    ],
)
def test_versions_that_are_labelled_early_are_dated_back_by_a_token(spans, dated):
    def wire(spans):
        return [{"version": str(version), "start": start, "end": end} for start, end, version in spans]

    mixed = answer([7] * spans[-1][1]) | {"meta_info": {"weight_versions": wire(spans)}}
    assert date_back(mixed)["meta_info"]["weight_versions"] == wire(dated)


def test_an_aborted_answer_is_partial():
    assert head_of(b'{"meta_info": {"finish_reason": {"type": "abort", "message": "m"}}}').is_partial
    assert not head_of(b'{"meta_info": {"finish_reason": {"type": "stop", "matched": 2}}}').is_partial
    with pytest.raises(msgspec.DecodeError):
        head_of(b"<html>")


@pytest.mark.parametrize("text", ["plain", 'a "meta_info": b', '"output_token_logprobs":[[1', "]] } [[", '\\"finish_reason\\"'])
@pytest.mark.parametrize("after", [{}, {"output_top_logprobs": [[[-0.1, 1, None]]]}])
def test_the_head_is_the_same_with_and_without_the_list_of_logprobs(text, after):
    meta_info = {
        "finish_reason": {"type": "stop", "matched": text},
        "prompt_tokens": 7,
        "output_token_logprobs": [[-0.5, 1, text], [-0.25, 2, text]],
        "completion_tokens": 2,
        "cached_tokens": 5,
        "weight_versions": [{"version": "1", "start": 0, "end": 2}],
    }
    body = msgspec.json.encode({"text": text, "output_ids": [1, 2], "meta_info": meta_info | after})
    meta = head_of(body).meta_info
    assert (meta.finish_reason.type, meta.prompt_tokens, meta.cached_tokens, meta.completion_tokens) == ("stop", 7, 5, 2)
    assert len(meta.weight_versions) == 1
