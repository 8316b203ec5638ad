from dataclasses import dataclass

import pytest

from services.inference_hub.request_limits import RequestLimits, common_limits
from services.inference_hub.resume import RefusedError


@dataclass(frozen=True)
class Engine:
    request_limits: RequestLimits


def test_what_every_engine_takes_is_the_least_of_what_they_say():
    limits = [RequestLimits(90, 100), RequestLimits(None, 80), RequestLimits(95, None)]
    assert common_limits(map(Engine, limits)) == RequestLimits(90, 80)
    assert common_limits([]) == RequestLimits()


@pytest.mark.parametrize(
    ("prompt", "new", "words"),
    [
        (91, 1, "at most 90 tokens, for which the engines' context and KV cache have room, got 91; shorten the prompt"),
        (60, 41, "together be at most 100 tokens, the engines' context length, got 60 [+] 41; ask for fewer tokens"),
        (91, None, "at most 90 tokens"),
    ],
)
def test_a_request_that_is_too_long_is_refused_with_rule_value_and_remedy(prompt: int, new: int | None, words: str):
    with pytest.raises(RefusedError, match=words) as caught:
        RequestLimits(90, 100).check(prompt, new)
    assert caught.value.status == 422


@pytest.mark.parametrize(("prompt", "new"), [(90, 10), (60, 40), (90, None), (1, 0)])
def test_a_request_that_fits_passes(prompt: int, new: int | None):
    RequestLimits(90, 100).check(prompt, new)
    RequestLimits().check(10**9, 10**9)
