"""Which engines an update is for: late ones, by turns, those that fail alone, and who may push at all."""

import asyncio

import msgspec
import pytest

from services.inference_hub.gate import Hold


def ids(served, *engines):
    return [served.hub.registry.find(engine.url).id for engine in engines]


async def test_a_late_engine_is_brought_up_alone_while_the_others_answer(serve_hub, start_engine, make_trainer):
    old = await start_engine()
    async with serve_hub(old.url) as served:
        await served.until_ready(1)
        trainer = make_trainer(served)
        await trainer.form_group()
        await trainer.push(3)
        late = await start_engine()
        await served.post("/engines", {"url": late.url})
        assert (await served.get("/weights"))[1] == {
            "version": 3,
            "epoch": "epoch-1",
            "ready_engines": 1,
            "wanting_engines": ids(served, late),
            "update": "committed",
        }
        num_calls = len(old.calls)
        await trainer.form_group(engine_ids=ids(served, late))
        _, begun = await trainer.begin(3)
        assert (await served.generate([1], 1))[0] == 200, "the other engine goes on"
        await trainer.load(begun["update_id"], is_last=True)
        await served.post(f"/weight_updates/{begun['update_id']}/commit")
        assert len(served.hub.registry.routable) == 2
        assert len(old.calls) == num_calls
        assert (await served.get("/weights"))[1]["wanting_engines"] == []


async def test_rolling_updates_never_stop_generation_and_end_at_one_version(serve_hub, start_engine, make_trainer):
    engines = [await start_engine() for _ in range(2)]
    async with serve_hub(*(engine.url for engine in engines)) as served:
        await served.until_ready(2)
        trainer = make_trainer(served)
        await trainer.form_group()
        await trainer.push(1)
        versions = []
        for engine in engines:
            await trainer.form_group(engine_ids=ids(served, engine))
            _, begun = await trainer.begin(2, rolling=True)
            versions.append((await served.generate([1], 1))[1]["meta_info"]["weight_versions"][0]["version"])
            await trainer.load(begun["update_id"], is_last=True)
            await served.post(f"/weight_updates/{begun['update_id']}/commit")
            assert len(served.hub.registry.routable) == 2
        assert versions == ["1", "2"]
        assert {request["extra_key"] for engine in engines for request in engine.requests} == {"epoch-1:1", "epoch-1:2"}
        assert served.hub.registry.previous is None, "an engine that comes back with version 1 has to be brought up"


async def test_an_engine_whose_weights_differ_is_taken_out_and_named(serve_hub, start_engine, make_trainer):
    good, bad = [await start_engine() for _ in range(2)]
    bad.checksums = {"w": "ff"}
    async with serve_hub(good.url, bad.url) as served:
        await served.until_ready(2)
        trainer = make_trainer(served)
        await trainer.form_group()
        status, report = await trainer.push(1, checksums={"w": "01"})
        assert status == 200
        assert report["engines"] == [good.url]
        assert report["left_out"] == {bad.url: "1 tensors differ from the trainer's: w"}
        assert report["is_verified"]
        assert [engine.url for engine in served.hub.registry.routable] == [good.url]
        assert served.hub.metrics.collectors.get_sample_value("headrace_hub_checksum_mismatches_total") == 1

        bad.checksums = good.checksums
        await trainer.form_group(engine_ids=ids(served, bad))
        assert (await trainer.push(1, checksums={"w": "01"}))[0] == 200
        assert len(served.hub.registry.routable) == 2


async def test_if_no_engine_has_what_was_sent_the_update_fails(weight_group):
    async with weight_group() as (served, _, trainer):
        status, answer = await trainer.push(1, checksums={"w": "ee"})
        assert status == 502
        assert "1 tensors differ from the trainer's: w" in answer["detail"]
        assert served.hub.registry.in_force.version == 0
        assert not served.hub.registry.routable


async def test_an_engine_that_alone_cannot_load_is_quarantined_until_it_restarts(serve_hub, start_engine, make_trainer):
    good, bad = [await start_engine() for _ in range(2)]
    bad.refusals["update_weights_from_distributed"] = "Failed to update parameter online: out of memory"
    async with serve_hub(good.url, bad.url) as served:
        await served.until_ready(2)
        trainer = make_trainer(served)
        for _ in range(2):
            await trainer.form_group()
            assert (await trainer.push(1))[0] in (409, 502)
        assert (await trainer.form_group())[1]["world_size"] == 2
        assert (await trainer.push(1))[0] == 200
        states = {engine["url"]: engine for engine in (await served.get("/engines"))[1]}
        assert states[bad.url]["state"] == "quarantined"
        assert "it failed 2 weight updates in a row" in states[bad.url]["problem"]
        assert (await served.get("/weights"))[1]["wanting_engines"] == []

        port = int(bad.url.rpartition(":")[2])
        await start_engine.kill(bad)
        engine = served.hub.registry.find(bad.url)
        await served.wait_until(lambda: not engine.is_verified, description="it is gone")
        bad.refusals.clear()
        await start_engine(bad, port)
        await served.wait_until(lambda: len(served.hub.registry.wanting) == 1, description="it asks for weights again")


async def test_a_quarantined_engine_gets_no_weights_and_no_calls(serve_hub, start_engine, make_trainer):
    good, other = [await start_engine() for _ in range(2)]
    async with serve_hub(good.url, other.url) as served:
        await served.until_ready(2)
        [other_id] = ids(served, other)
        trainer = make_trainer(served)
        await trainer.form_group()
        status, answer = await served.post(f"/engines/{other_id}/quarantine", {"problem": "it serves another model"})
        assert (status, answer["state"], answer["problem"]) == (200, "quarantined", "it serves another model")
        assert (await trainer.begin(1))[0] == 409, "the group has an engine that takes no weights"
        assert (await trainer.form_group())[1]["world_size"] == 2
        assert (await trainer.push(1))[0] == 200
        assert [engine.url for engine in served.hub.registry.routable] == [good.url]
        assert (await served.post("/engines/nobody/quarantine", {"problem": "why"}))[0] == 404


async def test_an_engine_in_an_update_is_not_quarantined(weight_group):
    async with weight_group() as (served, engine, trainer):
        await trainer.begin(1)
        status, answer = await served.post(f"/engines/{ids(served, engine)[0]}/quarantine", {"problem": "why"})
        assert status == 409
        assert "takes part in a weight update; try again when the update has ended" in answer["detail"]


@pytest.mark.parametrize(
    ("transport", "bucket", "path", "expected"),
    [
        ("disk", {"path": "/shared/set"}, "update_weights_from_disk", {"model_path": "/shared/set", "load_format": "safetensors"}),
        (
            "tensor",
            None,
            "update_weights_from_tensor",
            {"serialized_named_tensors": ["aGFuZGxl"], "load_format": "flattened_bucket"},
        ),
    ],
)
async def test_the_other_transports_need_no_process_group(serve_hub, start_engine, make_trainer, transport, bucket, path, expected):
    engine = await start_engine()
    async with serve_hub(engine.url) as served:
        await served.until_ready(1)
        trainer = make_trainer(served)
        await trainer.form_group(transport=transport)
        status, begun = await trainer.begin(4)
        assert status == 200
        bucket = bucket or {"handles": {ids(served, engine)[0]: ["aGFuZGxl"]}}
        status, answer = await trainer.load(begun["update_id"], is_last=True, names=["w"])
        assert status == 409
        assert f"over {transport} and must have" in answer["detail"]
        assert (await trainer.load(begun["update_id"], is_last=True, **bucket))[0] == 200
        assert (await served.post(f"/weight_updates/{begun['update_id']}/commit"))[0] == 200
        [payload] = engine.called(path)
        assert payload == {**expected, "weight_version": "4", "flush_cache": False}
        assert not engine.called("init_weights_update_group")
        assert len(engine.called("begin_weight_update")) == (transport == "tensor")
        assert len(served.hub.registry.routable) == 1


async def test_over_disk_an_engine_that_cannot_load_stops_no_other(serve_hub, start_engine, make_trainer):
    good, bad = [await start_engine() for _ in range(2)]
    bad.refusals["update_weights_from_disk"] = "Failed to get weights iterator: no such folder"
    async with serve_hub(good.url, bad.url) as served:
        await served.until_ready(2)
        trainer = make_trainer(served)
        await trainer.form_group(transport="disk")
        _, begun = await trainer.begin(1)
        assert (await trainer.load(begun["update_id"], is_last=True, path="/shared/set"))[0] == 200
        _, report = await served.post(f"/weight_updates/{begun['update_id']}/commit")
        assert report["engines"] == [good.url]
        assert "no such folder" in report["left_out"][bad.url]
        assert [engine.url for engine in served.hub.registry.routable] == [good.url]


async def test_a_folder_that_no_engine_sees_is_said_and_generation_goes_on(serve_hub, start_engine, make_trainer):
    engine = await start_engine()
    engine.refusals["update_weights_from_disk"] = "Failed to get weights iterator: Cannot find any model weights with `/mine/set`"
    async with serve_hub(engine.url) as served:
        await served.until_ready(1)
        trainer = make_trainer(served)
        await trainer.form_group(transport="disk")
        _, begun = await trainer.begin(1)
        status, answer = await trainer.load(begun["update_id"], is_last=True, path="/mine/set")
        assert status == 502
        assert "under the same path; mount it there" in answer["detail"]
        status, answer = await served.generate([1], 1)
        assert (status, answer["meta_info"]["weight_versions"][0]["version"]) == (200, "0")
        assert not engine.is_paused
    async with serve_hub() as served:
        await served.wait_until(lambda: len(served.hub.registry.routable) == 1, description="a restarted hub routes to it")


async def test_a_set_that_was_not_found_mends_no_part_of_an_earlier_one(weight_group):
    async with weight_group() as (served, engine, trainer):
        _, begun = await trainer.begin(1)
        await trainer.load(begun["update_id"], is_last=False)
        await served.delete(f"/weight_updates/{begun['update_id']}")
        engine.refusals["update_weights_from_disk"] = (
            "Failed to get weights iterator: Cannot find any model weights with `/mine/set`"
        )
        await trainer.form_group(transport="disk")
        _, begun = await trainer.begin(1)
        assert (await trainer.load(begun["update_id"], is_last=True, path="/mine/set"))[0] == 502
        await served.delete(f"/weight_updates/{begun['update_id']}")
        assert not served.hub.registry.routable
        assert engine.is_paused


@pytest.mark.parametrize(
    "bucket",
    [
        {"names": []},
        {"names": ["w", "v"], "dtypes": ["float32"], "shapes": [[2], [2]]},
        {"names": ["w"], "dtypes": ["float32"], "shapes": []},
        {"path": "/shared/set"},
    ],
)
async def test_a_bucket_that_says_too_little_is_refused_and_reaches_no_engine(weight_group, bucket):
    async with weight_group() as (_, engine, trainer):
        _, begun = await trainer.begin(1)
        status, answer = await trainer.load(begun["update_id"], is_last=True, **bucket)
        assert status == 409
        assert "a name, a dtype and a shape for each tensor" in answer["detail"]
        assert not engine.called("update_weights_from_distributed")
        assert (await trainer.load(begun["update_id"], is_last=True))[0] == 200


async def test_a_bucket_of_an_unknown_update_is_refused_and_generation_goes_on(weight_group):
    async with weight_group() as (served, _, trainer):
        status, answer = await trainer.load("no-such-update", is_last=True)
        assert (status, answer["code"]) == (404, "unknown_update")
        assert "start one with POST /weight_updates" in answer["detail"]
        assert (await served.generate([1], 1))[0] == 200


async def test_an_unknown_transport_is_refused_with_those_there_are(serve_hub, start_engine, make_trainer):
    engine = await start_engine()
    async with serve_hub(engine.url) as served:
        await served.until_ready(1)
        status, answer = await make_trainer(served).form_group(transport="pigeon")
        assert status == 422
        assert all(name in str(answer["detail"]) for name in ("broadcast", "disk", "tensor"))
        assert (await served.generate([1], 1))[0] == 200


async def test_the_last_bucket_may_carry_the_commit(weight_group):
    async with weight_group() as (_, engine, trainer):
        _, begun = await trainer.begin(1)
        layout = {"names": ["w"], "dtypes": ["float32"], "shapes": [[2]]}
        status, answer = await trainer.load(begun["update_id"], is_last=True, commit={"checksums": None}, **layout)
        assert (status, answer["state"]) == (200, "committed")
        assert answer["report"]["engines"] == [engine.url]
        assert not engine.is_paused
        assert not engine.in_session
        _, begun = await trainer.begin(2)
        status, answer = await trainer.load(begun["update_id"], is_last=False, commit={"checksums": None}, **layout)
        assert status == 409
        assert "after its last bucket" in answer["detail"]


async def test_an_engine_that_goes_on_does_not_wait_for_one_that_hangs(serve_hub, start_engine, make_trainer):
    engines = [await start_engine() for _ in range(2)]
    async with serve_hub(*(engine.url for engine in engines)) as served:
        await served.until_ready(2)
        engines[1].hanging.add("end_weight_update")
        trainer = make_trainer(served)
        await trainer.form_group()
        _, begun = await trainer.begin(1)
        await trainer.load(begun["update_id"], is_last=True)
        commit = asyncio.create_task(served.post(f"/weight_updates/{begun['update_id']}/commit"))
        await served.wait_until(lambda: not engines[0].is_paused, description="the one that took its weights goes on")
        assert not commit.done()
        await served.hub.registry.remove(served.hub.registry.find(engines[1].url))
        status, report = await commit
        assert (status, report["engines"]) == (200, [engines[0].url])


async def test_a_version_that_is_not_newer_is_refused_and_generation_goes_on(weight_group):
    async with weight_group() as (served, engine, trainer):
        await trainer.push(3)
        status, answer = await trainer.begin(2)
        assert (status, answer["code"]) == (409, "not_newer")
        assert "must bring a version above 3" in answer["detail"]
        status, answer = await trainer.begin(3)
        assert (status, answer["code"]) == (409, "already_in_force")
        assert not engine.is_paused
        assert (await served.generate([1], 1))[0] == 200


async def test_a_second_trainer_is_refused_while_the_first_listens(serve_hub, start_engine, make_trainer, unused_tcp_port):
    engine = await start_engine()
    async with serve_hub(engine.url) as served:
        await served.until_ready(1)
        first = make_trainer(served)
        await first.form_group("epoch-1")
        await first.push(1)
        status, answer = await first.form_group("epoch-2", master_port=unused_tcp_port)
        assert (status, answer["code"]) == (409, "other_trainer")
        assert f"that of epoch epoch-1 lives at 127.0.0.1:{first.port}" in answer["detail"]
        assert (await first.push(2))[0] == 200, "the first one's group is as it was"


async def test_what_a_hub_was_doing_outlives_it(weight_group, serve_hub, redis_client, keys):
    async with weight_group() as (served, engine, trainer):
        _, begun = await trainer.begin(1)
        await trainer.load(begun["update_id"], is_last=False)
        record = msgspec.json.decode(redis_client.hget(keys.weights, "update"))
        assert (record["state"], record["version"], record["engine_urls"]) == ("loading", 1, [engine.url])
        assert record["deadline_unix_s"] > 0
    async with serve_hub() as served:
        assert (await served.get("/status"))[1]["weight_update"] == "failed"
        status, answer = await served.post(f"/weight_updates/{begun['update_id']}/commit")
        assert (status, answer["code"]) == (404, "unknown_update")
        assert "the hub restarted while it was loading" in answer["detail"]
        assert msgspec.json.decode(redis_client.hget(keys.weights, "update"))["state"] == "failed"


async def test_calls_wait_for_the_update_only_if_it_has_every_engine(weight_group):
    async with weight_group() as (served, _, trainer):
        _, begun = await trainer.begin(1)
        call = asyncio.create_task(served.generate([1], 1))
        await served.wait_until(lambda: served.hub.num_held_calls == 1, description="the call waits")
        assert served.hub.gate.reasons == [Hold.WEIGHT_UPDATE]
        await served.delete(f"/weight_updates/{begun['update_id']}")
        assert (await call)[0] == 200
