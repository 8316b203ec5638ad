import asyncio

from services.inference_hub.gate import Hold


async def test_the_exchange_is_what_sglang_expects(serve_hub, start_engine, make_trainer):
    engines = [await start_engine() for _ in range(2)]
    async with serve_hub(*(engine.url for engine in engines)) as served:
        await served.until_ready(2)
        trainer = make_trainer(served)
        status, group = await trainer.form_group()
        assert status == 200
        assert group["world_size"] == 3
        assert [member["rank_offset"] for member in group["engines"]] == [1, 2]
        status, report = await trainer.push(1)
        assert status == 200
        assert report["version"] == 1
        assert report["pause_s"] >= report["pause_call_s"]
    for engine in engines:
        names = [name for name, _ in engine.calls]
        assert names == [
            "init_weights_update_group",
            "pause_generation",
            "begin_weight_update",
            "update_weights_from_distributed",
            "update_weights_from_distributed",
            "end_weight_update",
            "continue_generation",
        ]
        assert engine.called("pause_generation") == [{"mode": "in_place"}]
        first, last = engine.called("update_weights_from_distributed")
        assert (first["weight_version"], last["weight_version"]) == (None, "1")
        assert not first["flush_cache"]
        assert not last["flush_cache"]
        assert engine.called("init_weights_update_group")[0]["group_name"] == group["group_name"]


async def test_retracted_requests_recompute_their_cache(weight_group):
    async with weight_group() as (_, engine, trainer):
        await trainer.push(1, mode="retract")
    assert [payload["flush_cache"] for payload in engine.called("update_weights_from_distributed")] == [False, True]


async def test_new_calls_are_held_during_an_update_and_use_the_new_cache_namespace(weight_group):
    async with weight_group() as (served, engine, trainer):
        _, begun = await trainer.begin(1)
        call = asyncio.create_task(served.generate([1], 2))
        await served.wait_until(lambda: served.hub.num_held_calls == 1, description="the call is held")
        assert served.hub.gate.reasons == [Hold.WEIGHT_UPDATE]
        await trainer.load(begun["update_id"], is_last=True)
        assert not call.done()
        assert not engine.requests
        await served.post(f"/weight_updates/{begun['update_id']}/commit")
        status, answer = await call
        assert status == 200
        assert answer["meta_info"]["weight_versions"][0]["version"] == "1"
        assert engine.requests[0]["extra_key"] == "epoch-1:1"


async def test_a_group_without_an_engine_is_refused(serve_hub, make_trainer):
    async with serve_hub() as served:
        status, answer = await make_trainer(served).form_group()
    assert (status, answer["code"]) == (409, "no_engine")


async def test_a_new_engine_makes_the_group_stale_and_syncs_with_the_next(weight_group, start_engine):
    async with weight_group() as (served, engine, trainer):
        await trainer.push(1)
        late = await start_engine()
        assert (await served.post("/engines", {"url": late.url}))[1]["state"] == "syncing"
        status, answer = await trainer.begin(2)
        assert (status, answer["code"]) == (409, "group_stale")
        await trainer.form_group("epoch-2")
        assert engine.called("destroy_weights_update_group")
        await trainer.push(2)
        assert len(served.hub.registry.routable) == 2


async def test_an_engine_that_does_not_join_is_named(serve_hub, start_engine, make_trainer):
    engine = await start_engine()
    engine.refusals["init_weights_update_group"] = "Failed to initialize custom process group: no route"
    async with serve_hub(engine.url) as served:
        await served.until_ready(1)
        trainer = make_trainer(served)
        await trainer.form_group()
        status, answer = await served.post(f"/weight_groups/{trainer.group_name}/ready")
        assert status == 502
        assert engine.url in answer["detail"]
        assert "no route" in answer["detail"]
        assert (await trainer.begin(1))[1]["code"] == "group_stale"


async def test_engines_do_not_wait_for_a_trainer_that_does_not_listen(serve_hub, start_engine, make_trainer, unused_tcp_port):
    engine = await start_engine()
    async with serve_hub(engine.url, weight_update_timeout_s=0.3) as served:
        await served.until_ready(1)
        trainer = make_trainer(served)
        trainer.port = unused_tcp_port
        await trainer.form_group()
        status, answer = await served.post(f"/weight_groups/{trainer.group_name}/ready")
        assert status == 502
        assert f"the trainer must listen at 127.0.0.1:{unused_tcp_port}" in answer["detail"]
        assert not engine.called("init_weights_update_group")
        assert (await served.generate([1], 1))[0] == 200


async def test_an_update_given_up_before_its_first_bucket_changes_nothing(weight_group):
    async with weight_group() as (served, engine, trainer):
        _, begun = await trainer.begin(1)
        assert engine.is_paused
        assert (await served.delete(f"/weight_updates/{begun['update_id']}"))[0] == 200
        assert not engine.is_paused
        assert not engine.in_session
        assert (await served.generate([1], 1))[1]["meta_info"]["weight_versions"][0]["version"] == "0"
        assert (await trainer.push(1))[0] == 200


async def test_after_part_of_a_set_calls_wait_for_a_whole_one(weight_group):
    async with weight_group() as (served, engine, trainer):
        _, begun = await trainer.begin(1)
        await trainer.load(begun["update_id"], is_last=False)
        await served.delete(f"/weight_updates/{begun['update_id']}")
        call = asyncio.create_task(served.generate([1], 1))
        await served.wait_until(lambda: served.hub.num_held_calls == 1, description="the call is held")
        assert served.hub.gate.reasons == [Hold.NO_ENGINE]
        assert "may hold part of a set" in (await served.get("/engines"))[1][0]["problem"]
        assert engine.is_paused
        await trainer.push(1)
        assert (await call)[0] == 200


async def test_what_holds_part_of_a_set_stays_paused_when_the_next_update_fails_before_its_first_bucket(weight_group):
    """Calls that were in it when it was first paused must not go on with a mixture. Found by tests/protocol."""
    async with weight_group() as (served, engine, trainer):
        _, begun = await trainer.begin(1)
        await trainer.load(begun["update_id"], is_last=False)
        await served.delete(f"/weight_updates/{begun['update_id']}")
        await trainer.form_group()
        _, again = await trainer.begin(1)
        assert (await served.delete(f"/weight_updates/{again['update_id']}"))[0] == 200
        assert engine.is_paused
        await trainer.push(1)
        assert not engine.is_paused


async def test_a_hub_that_restarts_remembers_that_an_engine_holds_part_of_a_set(weight_group, serve_hub, make_trainer):
    async with weight_group() as (served, _, trainer):
        _, begun = await trainer.begin(1)
        await trainer.load(begun["update_id"], is_last=False)
    async with serve_hub() as served:
        await served.wait_until(lambda: bool(served.hub.registry.live), description="the engine is alive")
        assert not served.hub.registry.routable
        trainer = make_trainer(served)
        assert (await trainer.begin(1))[1]["code"] == "group_stale"
        assert (await served.post(f"/weight_updates/{begun['update_id']}/commit"))[0] == 404
        await trainer.form_group("epoch-2")
        await trainer.push(1)
        assert (await served.generate([1], 1))[0] == 200


async def test_a_trainer_that_falls_silent_fails_its_update(serve_hub, start_engine, make_trainer):
    engine = await start_engine()
    async with serve_hub(engine.url, weight_update_timeout_s=0.3) as served:
        await served.until_ready(1)
        trainer = make_trainer(served)
        await trainer.form_group()
        _, begun = await trainer.begin(1)
        assert (await served.generate([1], 1))[0] == 200
        status, answer = await trainer.load(begun["update_id"], is_last=True)
        assert status == 409
        assert "nothing happened for 0.3 s in state paused" in answer["detail"]


async def test_a_new_trainer_ends_what_a_dead_one_began(serve_hub, start_engine, make_trainer):
    engine = await start_engine()
    async with serve_hub(engine.url) as served:
        await served.until_ready(1)
        dead = make_trainer(served)
        await dead.form_group("epoch-1")
        _, begun = await dead.begin(1)
        await dead.load(begun["update_id"], is_last=False)
        alive = make_trainer(served)
        assert (await alive.form_group("epoch-2"))[0] == 200
        assert (await alive.push(0))[0] == 200
        status, answer = await served.post(f"/weight_updates/{begun['update_id']}/commit")
        assert (status, answer["code"]) == (404, "unknown_update")
        assert (await served.generate([1], 1))[0] == 200


async def test_a_bucket_one_engine_refuses_fails_the_update(serve_hub, start_engine, make_trainer):
    engines = [await start_engine() for _ in range(2)]
    engines[1].refusals["update_weights_from_distributed"] = "Failed to receive weights: Connection closed by peer"
    async with serve_hub(*(engine.url for engine in engines)) as served:
        await served.until_ready(2)
        trainer = make_trainer(served)
        await trainer.form_group()
        _, begun = await trainer.begin(1)
        status, answer = await trainer.load(begun["update_id"], is_last=True)
        assert status == 502
        assert engines[1].url in answer["detail"]
        assert not served.hub.registry.routable
        engines[1].refusals.clear()
        await trainer.push(1)
        assert len(served.hub.registry.routable) == 2


async def test_an_engine_that_hangs_in_a_broadcast_does_not_hang_the_hub(serve_hub, start_engine, make_trainer):
    engines = [await start_engine() for _ in range(2)]
    async with serve_hub(*(engine.url for engine in engines), weight_update_timeout_s=0.5) as served:
        await served.until_ready(2)
        engines[1].hanging.add("update_weights_from_distributed")
        trainer = make_trainer(served)
        await trainer.form_group()
        _, begun = await trainer.begin(1)
        status, _ = await trainer.load(begun["update_id"], is_last=True)
        assert status == 502
        await served.wait_until(lambda: len(served.hub.registry.live) == 1, description="the hanging engine is given up")
        await trainer.form_group("epoch-2")
        await trainer.push(1)
        assert (await served.generate([1], 1))[0] == 200


async def test_an_engine_that_hangs_after_the_last_bucket_is_left_out_at_the_deadline_and_the_others_commit(
    serve_hub, start_engine, make_trainer
):
    engines = [await start_engine() for _ in range(2)]
    async with serve_hub(*(engine.url for engine in engines), weight_update_timeout_s=3.0) as served:
        await served.until_ready(2)
        engines[1].hanging.add("end_weight_update")
        trainer = make_trainer(served)
        await trainer.form_group()
        status, report = await trainer.push(1)
        assert (status, report["engines"]) == (200, [engines[0].url])
        assert "must answer /end_weight_update within 3 s" in report["left_out"][engines[1].url]


async def test_an_engine_that_hangs_while_joining_is_left_out_of_the_next_group(serve_hub, start_engine, make_trainer):
    engines = [await start_engine() for _ in range(2)]
    async with serve_hub(*(engine.url for engine in engines), weight_update_timeout_s=3.0) as served:
        await served.until_ready(2)
        engines[1].hanging.add("init_weights_update_group")
        trainer = make_trainer(served)
        await trainer.form_group()
        await served.wait_until(lambda: len(served.hub.registry.live) == 1, description="the hanging engine is given up")
        assert (await trainer.form_group("epoch-2"))[1]["world_size"] == 2
        assert (await trainer.push(1))[0] == 200


async def test_only_one_update_runs_at_a_time(weight_group):
    async with weight_group() as (served, _, trainer):
        _, begun = await trainer.begin(1)
        status, answer = await trainer.begin(1)
        assert status == 409
        assert begun["update_id"] in answer["detail"]
        status, answer = await served.post(f"/weight_updates/{begun['update_id']}/commit")
        assert status == 409
        assert "after its last bucket" in answer["detail"]
        engine_id = (await served.get("/engines"))[1][0]["id"]
        assert (await served.delete(f"/engines/{engine_id}"))[0] == 409


async def test_a_session_that_a_dead_hub_left_open_is_closed_first(serve_hub, start_engine, make_trainer):
    engine = await start_engine()
    engine.in_session = True
    async with serve_hub(engine.url) as served:
        await served.until_ready(1)
        trainer = make_trainer(served)
        await trainer.form_group()
        assert (await trainer.push(1))[0] == 200


async def test_no_call_fails_while_updates_follow_each_other(serve_hub, start_engine, make_trainer):
    engines = [await start_engine() for _ in range(2)]
    async with serve_hub(*(engine.url for engine in engines)) as served:
        await served.until_ready(2)
        trainer = make_trainer(served)
        await trainer.form_group()
        is_over = asyncio.Event()

        async def agent(first: int) -> int:
            count = 0
            while not is_over.is_set() or count < 3:
                status, answer = await served.generate([first], 4)
                assert (status, answer["output_ids"]) == (200, [first + 1 + i for i in range(4)])
                count += 1
            return count

        async with asyncio.TaskGroup() as tasks:
            agents = [tasks.create_task(agent(100 * i)) for i in range(8)]
            for version in range(1, 6):
                await trainer.push(version)
            is_over.set()
        assert all(agent.result() >= 3 for agent in agents)
        assert served.hub.registry.in_force.version == 5
