import pytest


async def test_every_operation_is_documented(serve_hub):
    async with serve_hub() as served:
        _, documentation = await served.get("/openapi.json")
    operations = [operation for path in documentation["paths"].values() for operation in path.values()]
    assert "/generate" in documentation["paths"]
    assert all(operation.get("summary") and operation.get("description") for operation in operations)


async def test_every_message_has_examples_or_descriptions(serve_hub):
    async with serve_hub() as served:
        _, documentation = await served.get("/openapi.json")
    for name, schema in documentation["components"]["schemas"].items():
        if name in ("HTTPValidationError", "ValidationError") or "examples" in schema:
            continue
        for key, value in schema["properties"].items():
            assert {"examples", "description", "enum", "const", "title"} & value.keys(), f"{name}.{key}"


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
