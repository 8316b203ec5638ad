import re

import pytest

from shared.release import VERSION
from tests.services.openapi_walk import gaps, operations


async def test_every_operation_says_what_it_takes_answers_and_refuses(serve_hub):
    async with serve_hub() as served:
        _, document = await served.get("/openapi.json")
    assert gaps(document) == []
    assert document["info"]["version"] == VERSION
    assert document["paths"]["/engines"]["get"]["summary"] == "List engines"
    assert "/generate" in document["paths"]
    assert "HTTPValidationError" not in document["components"]["schemas"], "no route answers with one"


async def test_examples_of_requests_are_accepted(serve_hub, start_engine):
    engine = await start_engine()
    async with serve_hub() as served:
        _, document = await served.get("/openapi.json")
        await served.post("/engines", {"url": engine.url})
        for operation in operations(document):
            for example in operation.request_examples.values():
                body = {**example, "url": engine.url} if operation.path == "/engines" else example
                status, answer = await served.post(re.sub("{.*}", "one", operation.path), body)
                assert status not in (400, 422), f"{operation}: {answer}"
                assert str(status) in operation.body["responses"], f"{operation} answers {status}, which it does not document"


async def test_the_page_needs_no_other_server(serve_hub):
    async with serve_hub() as served:
        async with served.http.get(served.url + "/") as page:
            assert page.url.path == "/docs"
            assert "https://" not in await page.text()
        async with served.http.get(served.url + "/static-offline-docs/swagger-ui.css") as style:
            assert style.status == 200


async def test_health_says_that_the_process_serves_and_ready_that_it_can_generate(serve_hub, start_engine):
    engine = await start_engine()
    async with serve_hub() as served:
        assert await served.get("/health") == (200, {"status": "ok"})
        status, answer = await served.get("/ready")
        assert status == 503
        assert "GET /engines" in answer["detail"]
        await served.post("/engines", {"url": engine.url})
        assert await served.get("/ready") == (200, {"ready_engines": 1})


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/engines", {"url": "10.0.0.7"}, "body.url"),
        ("/engines", {"address": "http://10.0.0.7"}, "body.url: Field required"),
        ("/weight_groups", {"epoch": "a b", "master_address": "x", "master_port": 1, "backend": "gloo"}, "body.epoch"),
        ("/weight_groups", {"epoch": "a", "master_address": "x", "master_port": 1, "backend": "mpi"}, "'gloo' or 'nccl'"),
        ("/weight_updates", {"group_name": "g", "version": -1}, "body.version"),
    ],
)
async def test_bad_bodies_get_a_sentence(serve_hub, path, body, words):
    async with serve_hub() as served:
        status, answer = await served.post(path, body)
    assert status == 422
    assert words in answer["detail"]


async def test_metrics_count_calls_and_show_engines(serve_hub, start_engine):
    engine = await start_engine()
    async with serve_hub() as served:
        await served.post("/engines", {"url": engine.url})
        await served.generate([1], 3)
        async with served.http.get(served.url + "/metrics") as response:
            text = await response.text()
    assert 'headrace_hub_generate_calls_total{status="200"} 1.0' in text
    assert "headrace_hub_output_tokens_total 3.0" in text
    assert 'headrace_hub_engines{state="ready"} 1.0' in text
    assert "headrace_hub_policy_version 0.0" in text
    assert "# TYPE headrace_hub_loop_lag_seconds histogram" in text


async def test_usage_says_how_an_engines_ready_time_went(serve_hub, start_engine):
    engine = await start_engine()
    async with serve_hub() as served:
        await served.post("/engines", {"url": engine.url})
        _, [before] = await served.get("/usage")
        await served.generate([1], 3)
        _, [after] = await served.get("/usage")
        async with served.http.get(served.url + "/metrics") as response:
            text = await response.text()
    assert (after["max_running_calls"], after["max_tokens"]) == (4, 1000)
    assert before["used_s"] == 0
    assert before["idle_s"] == before["ready_s"]
    assert before["idle_s"] < after["idle_s"] < after["ready_s"]
    assert after["used_s"] == pytest.approx((after["ready_s"] - after["idle_s"]) / 4)
    for name in ("ready_seconds_total", "idle_seconds_total", "used_seconds_total", "max_running_calls", "max_tokens"):
        assert f'headrace_hub_engine_{name}{{engine="{after["id"]}"}}' in text


async def test_a_trainer_of_another_run_is_refused_before_it_touches_an_engine(serve_hub, start_engine, listening_port):
    engine = await start_engine()
    async with serve_hub(engine.url) as served:
        master = {"epoch": "e", "master_address": "127.0.0.1", "master_port": listening_port, "backend": "gloo"}
        status, refusal = await served.post("/weight_groups", {**master, "run_id": "another"})
        assert (status, refusal["code"]) == (409, "other_run")
        assert f"must be of the hub's run, '{served.hub.run_id}', got one of 'another'" in refusal["detail"]
        assert (await served.get("/status"))[1]["weight_groups"] == []
