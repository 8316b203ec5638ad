import json

import pytest

from benchmarks.hub.canned_engine import end_of_message
from benchmarks.hub.load import missing_bytes
from benchmarks.hub.makespan import episodes, request_body
from benchmarks.hub.messages import Shape, answer, answer_body, request
from benchmarks.hub.simulated_engine import request_in

WHOLE = answer(b'{"a": 1}')
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"


@pytest.mark.parametrize("whole", [WHOLE, CHUNKED, request(1, Shape(4, 2), session=3)])
def test_a_message_ends_where_it_says_and_not_before(whole: bytes):
    assert end_of_message(whole) == end_of_message(whole + b"HTTP/1.1 200") == len(whole)
    assert all(end_of_message(whole[:length]) is None for length in range(len(whole)))


def test_a_caller_knows_how_much_is_missing():
    assert missing_bytes(WHOLE[:-5]) == 5
    assert missing_bytes(CHUNKED[:-1]) == 1


def test_the_canned_answer_has_as_many_tokens_as_its_shape():
    body = json.loads(answer_body(Shape(512, 256)))
    assert len(body["output_ids"]) == len(body["meta_info"]["output_token_logprobs"]) == 256


def test_a_simulated_prompt_says_episode_and_lengths_and_begins_as_the_last_one():
    first, second = request_body(7, 10, 33), request_body(7, 50, 44)
    asked = request_in(second)
    assert (asked.episode, asked.prompt_tokens, asked.output_tokens) == (7, 50, 44)
    first_ids, second_ids = (json.loads(body)["input_ids"] for body in (first, second))
    assert second_ids[:9] == first_ids[:9]


def test_episodes_are_the_same_for_a_seed_and_have_long_tails():
    plans = episodes(1_000, seed=0)
    assert plans == episodes(1_000, seed=0)
    lengths = sorted(sum(turn.output_tokens for turn in plan) for plan in plans)
    assert lengths[-10] > 4 * lengths[500]
