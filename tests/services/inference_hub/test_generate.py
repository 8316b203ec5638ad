import asyncio
import io
from urllib.parse import urlsplit

import msgspec
import pytest


def counted(prompt: list[int], length: int) -> list[int]:
    return [prompt[-1] + 1 + i for i in range(length)]


async def ready(served) -> None:
    await served.wait_until(lambda: bool(served.hub.registry.routable), description="an engine is ready")


async def test_a_call_is_answered_as_the_engine_would(serve_hub, start_engine):
    engine = await start_engine()
    async with serve_hub(engine.url) as served:
        await ready(served)
        status, answer = await served.generate([1, 2, 3], 4)
    assert status == 200
    assert answer["output_ids"] == [4, 5, 6, 7]
    assert answer["meta_info"]["weight_versions"] == [{"version": "0", "start": 0, "end": 4}]
    (request,) = engine.requests
    assert request["return_logprob"] is True
    assert request["extra_key"] == "initial:0"
    assert len(request["rid"]) == 32


async def test_an_abort_never_reaches_the_caller(serve_hub, start_engine, plan):
    engine = await start_engine()
    engine.plans.extend([plan(stop_after=0), plan(stop_after=3), plan(stop_after=2)])
    async with serve_hub(engine.url) as served:
        await ready(served)
        status, answer = await served.generate([1, 2, 3], 8)
    assert status == 200
    assert answer["output_ids"] == counted([3], 8)
    assert [entry[1] for entry in answer["meta_info"]["output_token_logprobs"]] == counted([3], 8)
    assert answer["meta_info"]["weight_versions"] == [{"version": "0", "start": 0, "end": 8}]
    assert answer["meta_info"]["finish_reason"]["type"] == "length"
    assert len({request["rid"] for request in engine.requests}) == 4


async def test_a_call_whose_engine_fails_is_answered_by_another(serve_hub, start_engine, plan):
    engines = [await start_engine() for _ in range(2)]
    async with serve_hub(*(engine.url for engine in engines)) as served:
        await served.wait_until(lambda: len(served.hub.registry.routable) == 2, description="both engines are ready")
        for failure in (plan(status=500), plan(is_cut=True)):
            engines[0].plans.append(failure)
            engines[1].plans.append(plan())
            answers = await asyncio.gather(*(served.generate([5], 3) for _ in range(2)))
            assert [(status, answer["output_ids"]) for status, answer in answers] == [(200, [6, 7, 8])] * 2
            await served.wait_until(lambda: len(served.hub.registry.routable) == 2, description="both engines are ready again")


async def test_a_dead_engines_calls_are_held_until_it_is_back(serve_hub, start_engine, plan):
    engine = await start_engine()
    engine.plans.append(plan(is_held=True))
    async with serve_hub(engine.url) as served:
        await ready(served)
        call = asyncio.create_task(served.generate([1], 2))
        await engine.received.wait()
        await start_engine.kill(engine)
        await served.wait_until(lambda: served.hub.num_held_calls == 1, description="the call is held")
        assert (await served.get("/ready"))[0] == 503
        engine.plans.clear()
        await start_engine(engine, port=urlsplit(engine.url).port)
        assert (await call)[1]["output_ids"] == [2, 3]


async def test_engines_that_fail_every_attempt_make_a_sentence(serve_hub, start_engine, plan):
    engine = await start_engine()
    engine.plans.extend([plan(status=500)] * 3)
    async with serve_hub(engine.url, max_attempts=3) as served:
        await ready(served)
        status, answer = await served.generate([1], 2)
    assert status == 502
    assert "inference_hub.max_attempts" in answer["detail"]
    assert answer["detail"].count("answered status 500") == 3


async def test_without_an_engine_a_call_waits_and_then_says_why(serve_hub):
    async with serve_hub(generate_timeout_s=0.2) as served:
        status, answer = await served.generate([1], 2)
    assert status == 503
    assert "inference_hub.generate_timeout_s" in answer["detail"]
    assert "no engine holds the weights in force" in answer["detail"]


async def test_a_refusal_is_passed_on_and_the_engine_stays_well(serve_hub, start_engine, plan):
    engine = await start_engine()
    engine.plans.append(plan(status=400))
    async with serve_hub(engine.url) as served:
        await ready(served)
        assert await served.generate([1], 2) == (400, {"error": {"message": "as planned"}})
        assert served.hub.registry.routable


async def test_a_caller_that_leaves_has_its_request_aborted(serve_hub, start_engine, plan):
    engine = await start_engine()
    engine.plans.append(plan(is_held=True))
    async with serve_hub(engine.url) as served:
        await ready(served)
        call = asyncio.create_task(served.generate([1], 2))
        await engine.received.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await asyncio.wait_for(engine.aborted.wait(), 20)
        assert engine.called("abort_request") == [{"rid": engine.requests[0]["rid"]}]
        await served.wait_until(lambda: served.hub.generate.num_calls == 0, description="the call is over")
        assert served.hub.registry.routable[0].num_outstanding_calls == 0


async def test_a_caller_that_leaves_while_held_leaves_nothing_behind(serve_hub):
    async with serve_hub() as served:
        call = asyncio.create_task(served.generate([1], 2))
        await served.wait_until(lambda: served.hub.num_held_calls == 1, description="the call is held")
        call.cancel()
        await served.wait_until(lambda: served.hub.generate.num_calls == 0, description="the call is over")
        assert served.hub.num_held_calls == 0


async def test_the_calls_of_a_session_go_to_one_engine(serve_hub, start_engine):
    engines = [await start_engine() for _ in range(3)]
    async with serve_hub(*(engine.url for engine in engines)) as served:
        await served.wait_until(lambda: len(served.hub.registry.routable) == 3, description="all engines are ready")
        for _ in range(5):
            await served.generate([1], 2, headers={"X-Session-Id": "episode-1"})
    assert sorted(len(engine.requests) for engine in engines) == [0, 0, 5]


async def test_a_body_that_is_too_large_is_refused(serve_hub):
    async with serve_hub() as served:
        body = io.BytesIO(b"[" + b"1," * 9_000_000)
        async with served.http.post(served.url + "/generate", data=body) as response:
            assert response.status == 413
            assert "at most 16777216 bytes" in (await response.json())["detail"]


async def test_the_largest_body_is_a_setting(serve_hub, start_engine):
    engine = await start_engine()
    async with serve_hub(engine.url, max_body_bytes=1_000) as served:
        await ready(served)
        assert (await served.generate([1] * 100, 1))[0] == 200
        status, answer = await served.generate([1] * 1_000, 1)
    assert status == 413
    assert "at most 1000 bytes (inference_hub.max_body_bytes), got more" in answer["detail"]


@pytest.mark.parametrize(
    ("prompt", "new", "words"),
    [
        ([1, 10**6], 1, "ids below 1000000, the size of the engines' vocabulary, got 1000000 at index 1; use the tokenizer"),
        ([1] * 41, 1, "at most 40 tokens, for which the engines' context and KV cache have room, got 41; shorten the prompt"),
        ([1] * 30, 21, "together be at most 50 tokens, the engines' context length, got 30 + 21; ask for fewer tokens"),
        ([1], -1, "sampling_params.max_new_tokens must be >= 0, got -1; leave it out"),
    ],
)
async def test_what_engines_do_not_take_is_refused_before_they_see_it(serve_hub, start_engine, prompt, new, words):
    engine = await start_engine()
    engine.max_prompt_tokens, engine.context_tokens = 40, 50
    async with serve_hub(engine.url) as served:
        await ready(served)
        status, answer = await served.generate(prompt, new)
        assert (status, words in answer["detail"]) == (422, True), answer
        assert (await served.generate([1] * 40, 10))[0] == 200
    assert len(engine.requests) == 1


async def test_bad_bodies_are_refused_with_a_sentence(serve_hub):
    async with serve_hub() as served:
        async with served.http.post(served.url + "/generate", data=b"{nonsense") as response:
            assert response.status == 400
        status, answer = await served.post("/generate", {"text": "hello"})
    assert status == 422
    assert "input_ids" in answer["detail"]


async def test_no_call_is_lost_or_answered_wrongly_under_failures_of_all_kinds(serve_hub, start_engine, plan):
    engines = [await start_engine() for _ in range(3)]
    failures = [plan(stop_after=0), plan(stop_after=2), plan(status=503), plan(), plan(stop_after=5), plan()]
    for index, engine in enumerate(engines):
        engine.plans.extend(failures[index:] * 8)
    async with serve_hub(*(engine.url for engine in engines), max_attempts=50) as served:
        await served.wait_until(lambda: len(served.hub.registry.routable) == 3, description="all engines are ready")
        prompts = [[1000 * i] for i in range(40)]
        answers = await asyncio.gather(*(served.generate(prompt, 7) for prompt in prompts))
        assert all(engine.num_outstanding_calls == engine.outstanding_tokens == 0 for engine in served.hub.registry.routable)
    assert [answer["output_ids"] for _, answer in answers] == [counted(prompt, 7) for prompt in prompts]


async def test_connections_to_engines_are_kept_between_calls(serve_hub, start_engine):
    engine = await start_engine()
    async with serve_hub(engine.url, probe_interval_s=60.0) as served:  # A probe at the same time has a connection of its own.
        await ready(served)
        await served.generate([1], 1)
        for _ in range(5):
            await served.generate([1], 1)
        assert served.hub.registry.routable[0].client._connections.num_idle == 1


async def test_a_prompt_of_a_megabyte_passes(serve_hub, start_engine):
    engine = await start_engine()
    async with serve_hub(engine.url) as served:
        await ready(served)
        prompt = list(range(100_000, 260_000))
        body = io.BytesIO(msgspec.json.encode({"input_ids": prompt, "sampling_params": {"max_new_tokens": 1}}))
        async with served.http.post(served.url + "/generate", data=body) as response:
            assert response.status == 200
    assert engine.requests[0]["input_ids"] == prompt


async def test_calls_wait_in_the_hub_and_not_in_the_engine(serve_hub, start_engine, plan):
    engine = await start_engine()
    engine.plans.append(plan(is_held=True))
    engine.max_running_requests = 1
    async with serve_hub(engine.url) as served:
        await ready(served)
        await served.wait_until(lambda: served.hub.registry.routable[0].limit.value == 1, description="its limit is known")
        calls = [asyncio.create_task(served.generate([index], 1)) for index in range(3)]
        await served.wait_until(lambda: len(served.hub.generate.dispatcher.waiting) == 2, description="two calls wait")
        await served.wait_until(lambda: len(engine.requests) == 1, description="the engine has the first one")
        await served.hub.registry.routable[0].client.abort(engine.requests[0]["rid"])
        assert [answer["output_ids"] for _, answer in await asyncio.gather(*calls)] == [[1], [2], [3]]
        assert not served.hub.registry.routable[0].num_outstanding_calls


async def test_more_waiting_calls_than_allowed_are_told_when_to_come_back(serve_hub):
    async with serve_hub(max_waiting_calls=1) as served:
        first = asyncio.create_task(served.generate([1], 1))
        await served.wait_until(lambda: served.hub.num_held_calls == 1, description="a call waits")
        body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}
        async with served.http.post(served.url + "/generate", json=body) as response:
            assert (response.status, response.headers["retry-after"]) == (429, "5")
            assert "inference_hub.max_waiting_calls" in (await response.json())["detail"]
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)


async def test_a_caller_that_leaves_while_it_waits_for_a_place_leaves_the_others_theirs(serve_hub, start_engine, plan):
    engine = await start_engine()
    engine.plans.append(plan(is_held=True))
    engine.max_running_requests = 1
    async with serve_hub(engine.url) as served:
        await ready(served)
        await served.wait_until(lambda: served.hub.registry.routable[0].limit.value == 1, description="its limit is known")
        calls = [asyncio.create_task(served.generate([1], 1))]
        await served.wait_until(lambda: len(engine.requests) == 1, description="the engine has a call")
        calls += [asyncio.create_task(served.generate([index], 1)) for index in (2, 3)]
        await served.wait_until(lambda: len(served.hub.generate.dispatcher.waiting) == 2, description="two calls wait")
        calls[1].cancel()
        await served.wait_until(lambda: len(served.hub.generate.dispatcher.waiting) == 1, description="one left")
        await served.hub.registry.routable[0].client.abort(engine.requests[0]["rid"])
        assert (await calls[0])[1]["output_ids"] == [2]
        assert (await calls[2])[1]["output_ids"] == [4]
        await served.wait_until(lambda: served.hub.generate.num_calls == 0, description="nobody is left")
        assert not served.hub.registry.routable[0].num_outstanding_calls


async def test_a_malformed_token_id_disturbs_nobody(serve_hub, start_engine):
    engine = await start_engine()
    async with serve_hub(engine.url) as served:
        await ready(served)
        for bad in ([1.5], ["a"], [None], [-1], [[1]], {}, "1", 7, []):
            status, answer = await served.post("/generate", {"input_ids": bad})
            assert (status, "input_ids" in answer["detail"]) == (422, True)
        assert (await served.generate([1], 1))[0] == 200
    assert len(engine.requests) == 1
