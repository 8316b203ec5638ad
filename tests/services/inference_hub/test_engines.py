import asyncio
from urllib.parse import urlsplit

import pytest

from services.inference_hub.engine_client import EngineClient
from services.inference_hub.engines import Engine, EngineState, WeightsInForce, engine_id_of


def engine(**known) -> Engine:
    url = "http://engine"
    return Engine(engine_id_of(url), url, EngineClient(url), **known)


@pytest.mark.parametrize(
    ("known", "in_force", "state"),
    [
        ({}, WeightsInForce(0, "a"), EngineState.JOINING),
        ({"is_suspect": True}, WeightsInForce(0, "a"), EngineState.SUSPECT),
        ({"is_verified": True, "version": 0}, WeightsInForce(0, "a"), EngineState.READY),
        ({"is_verified": True, "version": 0}, WeightsInForce(3, "a"), EngineState.SYNCING),
        ({"is_verified": True, "version": 3, "synced_epoch": "a"}, WeightsInForce(3, "a"), EngineState.READY),
        ({"is_verified": True, "version": 3, "synced_epoch": "old"}, WeightsInForce(3, "a"), EngineState.SYNCING),
        (
            {"is_verified": True, "version": 3, "synced_epoch": "a", "is_incomplete": True},
            WeightsInForce(3, "a"),
            EngineState.SYNCING,
        ),
        ({"is_verified": True, "version": None}, WeightsInForce(0, "a"), EngineState.SYNCING),
        ({"is_verified": True, "version": 0, "is_suspect": True}, WeightsInForce(0, "a"), EngineState.SUSPECT),
        ({"is_verified": True, "version": 0, "is_draining": True}, WeightsInForce(0, "a"), EngineState.DRAINING),
        ({"is_verified": True, "version": 0, "is_gone": True}, WeightsInForce(0, "a"), EngineState.GONE),
    ],
)
async def test_state_follows_from_what_is_known(known, in_force, state):
    assert engine(**known).state(in_force) is state


async def test_an_engine_is_registered_once(serve_hub, start_engine):
    fake = await start_engine()
    async with serve_hub() as served:
        status, first = await served.post("/engines", {"url": fake.url})
        assert (status, first["state"]) == (201, "ready")
        status, refusal = await served.post("/engines", {"url": fake.url + "/"})
        assert status == 409
        assert f"engine {first['id']} is at this address, ready; DELETE /engines/{first['id']} first" in refusal["detail"]
        assert (await served.get("/engines"))[1] == [first]
        assert (await served.get("/ready"))[0] == 200


async def test_an_engine_that_several_register_at_once_is_one(serve_hub, start_engine):
    fake = await start_engine()
    async with serve_hub() as served:
        answers = await asyncio.gather(*(served.post("/engines", {"url": fake.url}) for _ in range(4)))
        assert sorted(status for status, _ in answers) == [201, 409, 409, 409]
        assert [engine.url for engine in served.hub.registry.by_id.values()] == [fake.url]


async def test_an_engine_nobody_can_reach_is_not_registered(serve_hub, unused_tcp_port):
    async with serve_hub() as served:
        status, answer = await served.post("/engines", {"url": f"http://127.0.0.1:{unused_tcp_port}"})
        assert status == 422
        assert "must be reachable" in answer["detail"]
        assert (await served.get("/engines"))[1] == []


async def test_an_engine_of_another_version_is_refused_unless_any_will_do(serve_hub, start_engine):
    fake = await start_engine()
    fake.version = "0.4.9"
    async with serve_hub() as served:
        status, answer = await served.post("/engines", {"url": fake.url})
        assert status == 422
        assert "must be SGLang 0.5.23 (inference_hub.engine_version), got 0.4.9" in answer["detail"]
    async with serve_hub(engine_version="any") as served:
        assert (await served.post("/engines", {"url": fake.url}))[0] == 201


async def test_an_engine_with_another_model_is_refused(serve_hub, start_engine, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    fake = await start_engine()
    async with serve_hub(model_path=tmp_path) as served:
        fake.model_type = "llama"
        status, answer = await served.post("/engines", {"url": fake.url})
        assert status == 422
        assert "must serve the run's model (run.model_path), which is a qwen3, got a llama; start it" in answer["detail"]
        fake.model_type = "qwen3"
        assert (await served.post("/engines", {"url": fake.url}))[0] == 201


@pytest.mark.parametrize(
    "url",
    [
        "http://",
        "http://host:0",
        "http://host:99999",
        "http://[::1",
        f"http://{'a' * 64}",
        "http://a..b",
        "http://u:p@h",
        "ftp://h",
    ],
)
async def test_an_address_that_no_engine_can_have_is_refused(serve_hub, url):
    async with serve_hub() as served:
        status, answer = await served.post("/engines", {"url": url})
    assert status == 422
    assert "POST /engines: body.url: " in answer["detail"]


async def test_a_configured_engine_of_another_version_is_listed_and_logged_with_the_reason_once(serve_hub, start_engine, caplog):
    fake = await start_engine()
    fake.version = "0.4.9"
    async with serve_hub(fake.url) as served:
        await served.wait_until(
            lambda: any(engine.num_failed_probes > 2 for engine in served.hub.registry.by_id.values()),
            description="it was probed three times",
        )
        (listed,) = (await served.get("/engines"))[1]
    sentence = f"engine {fake.url} must be SGLang 0.5.23 (inference_hub.engine_version), got 0.4.9"
    assert (listed["state"], listed["problem"].startswith(sentence)) == ("joining", True)
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == [f"engine={listed['id']} problem: {listed['problem']}"]


async def test_an_engine_of_the_configuration_joins_when_it_is_up(serve_hub, start_engine, unused_tcp_port):
    async with serve_hub(f"http://127.0.0.1:{unused_tcp_port}") as served:
        await served.wait_until(
            lambda: any(engine.problem for engine in served.hub.registry.by_id.values()), description="the engine was tried"
        )
        (listed,) = (await served.get("/engines"))[1]
        assert listed["state"] == "joining"
        assert "must be reachable" in listed["problem"]
        await start_engine(port=unused_tcp_port)
        await served.wait_until(lambda: bool(served.hub.registry.routable), description="the engine is ready")


async def test_a_removed_engine_finishes_its_calls_and_is_forgotten(serve_hub, start_engine, plan):
    fake = await start_engine()
    fake.plans.append(plan(is_held=True))
    async with serve_hub(fake.url) as served:
        await served.wait_until(lambda: bool(served.hub.registry.routable), description="the engine is ready")
        call = asyncio.create_task(served.generate([1], 1))
        await fake.received.wait()
        (listed,) = (await served.get("/engines"))[1]
        status, removed = await served.delete(f"/engines/{listed['id']}")
        assert (status, removed["state"], removed["outstanding_calls"]) == (200, "draining", 1)
        fake.stop()
        assert (await call)[1]["output_ids"] == [2]
        await served.wait_until(lambda: not served.hub.registry.by_id, description="the engine is forgotten")
        assert (await served.delete(f"/engines/{listed['id']}"))[0] == 404
    async with serve_hub() as served:
        assert (await served.get("/engines"))[1] == []


async def test_a_restarted_hub_knows_its_engines_and_the_weights_in_force(serve_hub, start_engine, make_trainer):
    fake = await start_engine()
    async with serve_hub(fake.url) as served:
        await served.wait_until(lambda: bool(served.hub.registry.routable), description="the engine is ready")
        trainer = make_trainer(served)
        await trainer.form_group("epoch-7")
        await trainer.push(5)
    async with serve_hub() as served:
        await served.wait_until(lambda: bool(served.hub.registry.routable), description="the engine is ready")
        status = (await served.get("/status"))[1]
        assert (status["version"], status["epoch"], status["engines"]) == (5, "epoch-7", {"ready": 1})
        await served.generate([1], 1)
        assert fake.requests[-1]["extra_key"] == "epoch-7:5"


async def test_an_engine_that_a_dead_hub_left_paused_goes_on(serve_hub, start_engine):
    fake = await start_engine()
    fake.is_paused = True
    async with serve_hub(fake.url) as served:
        await served.wait_until(lambda: bool(served.hub.registry.routable), description="the engine is ready")
    assert not fake.is_paused


async def test_an_engine_that_restarted_gets_no_calls_before_it_has_the_weights(serve_hub, start_engine, make_trainer):
    fake = await start_engine()
    async with serve_hub(fake.url) as served:
        await served.wait_until(lambda: bool(served.hub.registry.routable), description="the engine is ready")
        trainer = make_trainer(served)
        await trainer.form_group()
        await trainer.push(1)
        await start_engine.kill(fake)
        await served.wait_until(lambda: not served.hub.registry.routable, description="the engine is missed")
        fake.label = "default"
        await start_engine(fake, port=urlsplit(fake.url).port)
        await served.wait_until(lambda: bool(served.hub.registry.live), description="the engine is back")
        (listed,) = (await served.get("/engines"))[1]
        assert listed["state"] == "syncing"
        assert "holds version 0" in listed["problem"]
        status, answer = await trainer.begin(2)
        assert (status, answer["code"]) == (409, "group_stale")
        await trainer.form_group("epoch-2")
        await trainer.push(2)
        assert (await served.generate([1], 1))[0] == 200


async def test_weights_of_an_earlier_lineage_are_not_taken_for_those_in_force(serve_hub, start_engine, make_trainer):
    engines = [await start_engine() for _ in range(2)]
    async with serve_hub(*(engine.url for engine in engines)) as served:
        await served.wait_until(lambda: len(served.hub.registry.routable) == 2, description="both engines are ready")
        trainer = make_trainer(served)
        await trainer.form_group("lineage-1")
        await trainer.push(3)
        await start_engine.kill(engines[1])
        await served.wait_until(lambda: len(served.hub.registry.live) == 1, description="the dead engine is missed")
        await trainer.form_group("lineage-2")
        await trainer.push(3)
        await start_engine(engines[1], port=urlsplit(engines[1].url).port)
        await served.wait_until(lambda: len(served.hub.registry.live) == 2, description="the engine is back")
        assert engines[1].label == "3"
        assert [engine.url for engine in served.hub.registry.routable] == [engines[0].url]


async def test_an_engine_removed_by_force_is_forgotten_at_once_and_its_call_begins_again_elsewhere(serve_hub, start_engine, plan):
    engines = [await start_engine() for _ in range(2)]
    for fake in engines:
        fake.plans.append(plan(is_held=True))
    async with serve_hub(*(fake.url for fake in engines)) as served:
        await served.wait_until(lambda: len(served.hub.registry.routable) == 2, description="both engines are ready")
        call = asyncio.create_task(served.generate([1], 1))
        await served.wait_until(lambda: any(fake.requests for fake in engines), description="an engine has the call")
        busy, idle = sorted(engines, key=lambda fake: len(fake.requests), reverse=True)
        idle.plans.clear()
        (listed,) = [engine for engine in (await served.get("/engines"))[1] if engine["url"] == busy.url]
        status, removed = await served.delete(f"/engines/{listed['id']}?force=true")
        assert (status, removed["state"]) == (200, "gone")
        assert (await call)[1]["output_ids"] == [2]
        assert [engine["url"] for engine in (await served.get("/engines"))[1]] == [idle.url]


async def test_a_change_of_state_is_one_line_in_the_log(serve_hub, start_engine, caplog):
    fake = await start_engine()
    with caplog.at_level("INFO", logger="services.inference_hub.engines"):
        async with serve_hub(fake.url) as served:
            await served.wait_until(lambda: bool(served.hub.registry.routable), description="the engine is ready")
    lines = [record.message for record in caplog.records if record.name == "services.inference_hub.engines"]
    id_ = engine_id_of(fake.url)
    assert lines == [f"engine={id_} state=joining was=new version=None", f"engine={id_} state=ready was=joining version=0"]
