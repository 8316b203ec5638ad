"""What kills weight updates, done to real processes: engine, trainer, hub. Nothing serves a mixture, and the run goes on."""

import asyncio
import signal
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import httpx
import pytest
import torch

from services.standalone.ports import free_ports
from shared.configuration import WeightPushSection
from tests.services.inference_hub.constant_weights import SHAPES
from trainer import weight_push
from trainer.hub_client import HubClient
from trainer.weight_buckets import WeightSource
from trainer.weight_push import WeightPusher

FOLDER = Path(__file__).parent
STEP_TIMEOUT_S = 12.0
PUSH_TIMEOUT_S = 4.0
PATIENCE = {"weight_update_timeout_s": STEP_TIMEOUT_S, "generate_timeout_s": 280.0}
"""Calls wait for engines that take long to start on a busy machine."""
pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def processes(timeline):
    """Starts engines; those that still run are ended, stopped ones too."""
    started = []

    def start(*fault, port=None):
        [port] = [port] if port else free_ports(1)
        if fault:
            action, path, count = fault
            timeline.fault(f"engine:{port}", f"will {action} itself at call {count} of /{path}")
        else:
            timeline.note(f"engine:{port}", "started")
        process = subprocess.Popen([sys.executable, str(FOLDER / "engine_process.py"), str(port), *map(str, fault)])
        started.append(process)
        process.url = f"http://127.0.0.1:{port}"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def new_pusher(one_rank, monkeypatch, timeline):
    """Four weights in four buckets: the last is gathered while the second is sent."""
    monkeypatch.setattr(weight_push, "MIB", 24)
    opened = []

    def make(url, notices):
        def notice(text):
            notices.append(text)
            timeline.noticed("trainer", text)

        pusher = WeightPusher(
            HubClient(url, timeout_s=60),
            WeightPushSection(backend="gloo", bucket_mib=1, timeout_s=PUSH_TIMEOUT_S),
            dtype=torch.float32,
            device=torch.device("cpu"),
            patience_s=60,
            notice=notice,
            can_check_values=True,
        )
        opened.append(pusher)
        return pusher

    yield make
    for pusher in opened:
        pusher.close()


def source(version):
    return WeightSource.of([(name, torch.full(shape, float(version))) for name, shape in SHAPES.items()])


async def push(pusher, version):
    return await asyncio.to_thread(pusher.push, source(version), version)


@asynccontextmanager
async def agents(url):
    """Calls that go on all the time. Every answer is whole, of one version; none fails. Yields the versions seen."""
    versions = []
    is_over = asyncio.Event()

    async def agent(http):
        while not is_over.is_set():
            body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 4}}
            async with http.post(f"{url}/generate", json=body) as response:
                answer = await response.json()
                assert response.status == 200, answer
            [span] = answer["meta_info"]["weight_versions"]
            assert answer["output_ids"] == [int(span["version"])] * 4, "a mixture of weights"
            versions.append(int(span["version"]))
            await asyncio.sleep(0.01)

    async with aiohttp.ClientSession() as http, asyncio.TaskGroup() as tasks:
        for _ in range(4):
            tasks.create_task(agent(http))
        yield versions
        is_over.set()


async def engine_states(served):
    return {engine["url"]: engine["state"] for engine in (await served.get("/engines"))[1]}


async def ready(served, count):
    async with asyncio.timeout(120):
        while len(served.hub.registry.routable) != count:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("fault", ["kill", "stop"])
@pytest.mark.parametrize(
    ("path", "count"),
    [("init_weights_update_group", 1), ("pause_generation", 2), ("update_weights_from_distributed", 6), ("end_weight_update", 2)],
    ids=["joining", "before", "during", "after"],
)
async def test_an_engine_lost_at_any_moment_is_left_out_and_the_others_go_on(
    serve_hub, processes, new_pusher, timeline, fault, path, count
):
    victim = processes(fault, path, count)
    others = [processes() for _ in range(2)]
    notices = []
    async with serve_hub(victim.url, *(engine.url for engine in others), **PATIENCE, probe_interval_s=0.5) as served:
        await ready(served, 3)
        pusher = new_pusher(served.url, notices)
        async with agents(served.url) as versions:
            await push(pusher, 1)
            await push(pusher, 2)
            async with asyncio.timeout(120):
                while versions[-1:] != [2]:
                    await asyncio.to_thread(pusher.catch_up, source(2), 2)
                    await asyncio.sleep(0.1)
        timeline.recovered("run", "version 2 is in force without the victim")
        states = await engine_states(served)
        assert "ready" in [states[engine.url] for engine in others]
        assert states[victim.url] != "ready"
        assert any(victim.url in notice or "failed and is made again" in notice for notice in notices), notices

        if fault == "stop":
            victim.send_signal(signal.SIGCONT)
            timeline.note("victim", "SIGCONT")
        else:
            victim.wait()
            processes(port=int(victim.url.rpartition(":")[2]))
        async with agents(served.url) as versions, asyncio.timeout(120):
            while len(served.hub.registry.routable) < 3:
                await asyncio.to_thread(pusher.catch_up, source(2), 2)
                await asyncio.sleep(0.1)
        timeline.recovered("victim", "serves version 2 again")
        assert set(versions) == {2}, "an engine that comes back has the version in force before its first call"


async def test_a_trainer_killed_in_the_middle_leaves_calls_waiting_for_the_next_one(serve_hub, processes, new_pusher, repository):
    engines = [processes() for _ in range(2)]
    async with serve_hub(*(engine.url for engine in engines), **PATIENCE) as served:
        await ready(served, 2)
        script = [sys.executable, str(FOLDER / "pushing_trainer.py"), served.url, "1", "3"]
        trainer = await asyncio.create_subprocess_exec(*script, cwd=repository, env={"PYTHONPATH": str(repository)})
        assert await trainer.wait() == -signal.SIGKILL
        async with agents(served.url) as versions:
            await push(new_pusher(served.url, []), 5)
            await served.wait_until(lambda: 5 in versions, description="calls are answered with version 5")
        assert set(versions) == {5}


async def test_no_second_trainer_while_the_first_lives(serve_hub, processes, new_pusher):
    engine = processes()
    async with serve_hub(engine.url, **PATIENCE) as served:
        await ready(served, 1)
        first, notices = new_pusher(served.url, []), []
        await push(first, 1)
        second = new_pusher(served.url, notices)
        with pytest.raises(weight_push.WeightUpdateError, match="a run has one trainer at a time"):
            await push(second, 1)
        assert (await served.generate([1], 4))[1]["output_ids"] == [1] * 4
        first.close()
        await push(second, 1)


async def test_all_engines_gone_pauses_the_run_until_one_is_back(serve_hub, processes, new_pusher):
    engine = processes()
    notices = []
    async with serve_hub(engine.url, **PATIENCE, probe_interval_s=0.2) as served:
        await ready(served, 1)
        pusher = new_pusher(served.url, notices)
        await push(pusher, 1)
        engine.kill()
        engine.wait()
        await ready(served, 0)
        assert (await push(pusher, 2)).is_deferred
        assert "version 2 waits for an engine" in notices[-1]
        assert not await asyncio.to_thread(pusher.catch_up, source(2), 2)
        call = asyncio.create_task(served.generate([1], 4))
        processes(port=int(engine.url.rpartition(":")[2]))
        async with asyncio.timeout(120):
            while not await asyncio.to_thread(pusher.catch_up, source(2), 2):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        assert (await call)[1]["output_ids"] == [2] * 4


def test_a_hub_restarted_in_the_middle_forgets_no_half_update(processes, new_pusher, redis_url, keys, tmp_path, repository):
    engines = [processes() for _ in range(2)]
    [port] = free_ports(1)
    run_file = tmp_path / "run.yaml"
    (tmp_path / "config.json").write_text("{}")
    run_file.write_text(
        f"""
run: {{id: {keys.run_id}, directory: {tmp_path}, model_path: {tmp_path}}}
redis: {{url: "{redis_url}"}}
engines: {{urls: ["{engines[0].url}", "{engines[1].url}"]}}
inference_hub: {{port: {port}, weight_update_timeout_s: {STEP_TIMEOUT_S}, probe_interval_s: 0.2}}
trainer: {{num_updates: 1}}
"""
    )
    url = f"http://127.0.0.1:{port}"
    hubs = []

    def start_hub():
        command = [sys.executable, "-m", "services.inference_hub", "--config", str(run_file)]
        hubs.append(subprocess.Popen(command, cwd=repository, env={"PYTHONPATH": str(repository)}))

    def until(is_true, client):
        for _ in range(600):
            try:
                if is_true(client.get(f"{url}/weights").json()):
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        pytest.fail("did not happen")

    restarted_in = []

    def gather():
        for index, (name, shape) in enumerate(SHAPES.items()):
            if index == 3 and len(hubs) == 1:
                restarted_in.append(client.get(f"{url}/weights").json()["update"])
                hubs[0].kill()
                hubs[0].wait()
                start_hub()
            yield name, torch.full(shape, 1.0)

    with httpx.Client(trust_env=False) as client:
        try:
            start_hub()
            until(lambda weights: weights["ready_engines"] == 2, client)
            new_pusher(url, notices := []).push(WeightSource(gather, 30), 1)
            until(lambda weights: (weights["version"], weights["ready_engines"]) == (1, 2), client)
        finally:
            for hub in hubs:
                hub.kill()
                hub.wait()
    assert restarted_in == ["loading"]
    assert notices
