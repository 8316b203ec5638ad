"""The simulated engine of bench-hub, by hand."""

import pytest

from benchmarks.hub.engine_model import (
    CONTEXT_TOKEN_S,
    PREFILL_TOKEN_S,
    STEP_S,
    WEIGHTS_S,
    EngineModel,
    ModelRequest,
)


def request(episode: int, prompt: int, output: int = 1, most: int = 1) -> ModelRequest:
    return ModelRequest(episode, prompt, output, most)


def test_one_request_takes_its_prefill_and_a_step_for_each_token():
    model = EngineModel()
    model.submit(request(0, 4_000, output=2))
    steps = 2 * STEP_S + 2 * WEIGHTS_S + (4_000 + 4_001) * CONTEXT_TOKEN_S
    expected = STEP_S + 4_000 * PREFILL_TOKEN_S + steps
    while not model.advance(model.now + 1e-9):
        pass
    assert model.now == pytest.approx(expected)


def test_the_next_turn_finds_its_prefix_and_another_episode_does_not():
    model = EngineModel()
    model.submit(request(0, 100, output=10))
    model.advance(1.0)
    model.submit(request(0, 150))
    model.submit(request(1, 150))
    cached = {finished.episode: finished.cached_tokens for finished in model.advance(2.0)}
    assert cached == {0: 110, 1: 0}


def test_the_least_recently_used_prefix_makes_room():
    model = EngineModel(cache_tokens=350)
    for episode in (0, 1, 2):
        model.submit(request(episode, 100, output=10))
        model.advance(model.now + 1.0)
    model.submit(request(3, 100, output=10))
    model.advance(model.now + 1.0)
    found = []
    for episode in (3, 2, 0):
        model.submit(request(episode, 111))
        found += [finished.cached_tokens for finished in model.advance(model.now + 1.0)]
    assert found[:2] == [110, 110]
    assert found[2] < 110


def test_when_running_requests_fill_the_cache_the_last_one_is_retracted_and_still_answered():
    model = EngineModel(cache_tokens=300)
    requests = [request(episode, 100, output=90) for episode in range(2)]
    for each in requests:
        model.submit(each)
    finished = model.advance(100.0)
    assert {each.episode for each in finished} == {0, 1}
    assert [each.num_retractions for each in requests] == [0, 1]


def test_what_does_not_fit_waits_in_order():
    model = EngineModel(cache_tokens=250)
    for episode in range(4):
        model.submit(request(episode, 120, output=5))
    assert [finished.episode for finished in model.advance(100.0)] == [0, 1, 2, 3]
