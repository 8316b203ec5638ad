"""A hub served by the real uvicorn over a real Redis, and engines that speak SGLang's HTTP API and fail when told to."""

import asyncio
import socket
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvicorn
from aiohttp import web

from services.inference_hub.hub import Hub, open_hub
from services.inference_hub.server import redis_client, server_settings
from shared.configuration import Configuration, EnginesSection, InferenceHubSection, RedisSection, RunSection, TrainerSection
from shared.keys import Keys

VOCABULARY = 10**6


@dataclass
class Plan:
    """How an engine answers one generate call. The default answers it completely."""

    stop_after: int | None = None
    """Abort with this many tokens."""
    status: int | None = None
    """Answer with this status instead."""
    is_cut: bool = False
    """Close the connection instead."""
    is_held: bool = False
    """Answer only when the request is aborted, with one token."""


class FakeEngine:
    """An engine whose policy counts: each token is the one before plus one, its log-probability minus a thousandth of it.

    Any continuation of a prompt is therefore known, whatever happened on the way.
    """

    def __init__(self) -> None:
        self.url = ""
        self.version = "0.5.23"
        self.model_type = "qwen3"
        self.max_prompt_tokens: int | None = None
        self.context_tokens: int | None = None
        self.label = "0"
        self.max_running_requests = 0
        self.is_paused = False
        self.in_session = False
        self.plans: deque[Plan] = deque()
        self.requests: list[dict[str, Any]] = []
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.refusals: dict[str, str] = {}
        self.checksums = {"w": "01"}
        self.hanging: set[str] = set()
        self.aborted = asyncio.Event()
        self.received = asyncio.Event()
        self._stopping = asyncio.Event()
        self._held: dict[str, asyncio.Event] = {}

    def application(self) -> web.Application:
        application = web.Application(client_max_size=2**24)
        application.add_routes(
            [
                web.post("/generate", self._generate),
                web.post("/abort_request", self._abort),
                web.get("/model_info", self._model_info),
                web.get("/server_info", self._server_info),
                web.get("/ready", self._ready),
                web.get("/v1/loads", self._loads),
                web.get("/v1/models", self._models),
                web.post("/{path}", self._control),
            ]
        )
        return application

    def called(self, path: str) -> list[dict[str, Any]]:
        return [payload for name, payload in self.calls if name == path]

    def stop(self) -> None:
        self._stopping.set()
        for event in self._held.values():
            event.set()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if "token_ids_logprob" in body:
            beyond = body["token_ids_logprob"][0]
            message = f"token_ids_logprob contains out-of-vocabulary token id {beyond}; valid range is [0, {VOCABULARY})."
            return web.json_response({"error": {"message": message}}, status=400)
        self.requests.append(body)
        plan = self.plans.popleft() if self.plans else Plan()
        self.received.set()
        if plan.is_cut:
            assert request.transport is not None
            request.transport.close()
            return web.Response()
        if plan.status is not None:
            return web.json_response({"error": {"message": "as planned"}}, status=plan.status)
        length = body["sampling_params"]["max_new_tokens"]
        if plan.is_held:
            await self._held.setdefault(body["rid"], asyncio.Event()).wait()
            return web.json_response(self._answer(body, min(1, length), is_aborted=True))
        if plan.stop_after is not None:
            return web.json_response(self._answer(body, min(plan.stop_after, length), is_aborted=True))
        return web.json_response(self._answer(body, length, is_aborted=False))

    def _answer(self, body: dict[str, Any], length: int, *, is_aborted: bool) -> dict[str, Any]:
        last = body["input_ids"][-1]
        ids = [last + 1 + i for i in range(length)]
        reason = {"type": "abort", "message": "Abort in waiting queue"} if is_aborted else {"type": "length", "length": length}
        meta_info = {"id": body["rid"], "finish_reason": reason, "weight_version": self.label}
        if ids or not is_aborted:
            meta_info |= {
                "prompt_tokens": len(body["input_ids"]),
                "completion_tokens": length,
                "cached_tokens": 0,
                "output_token_logprobs": [[-token / 1000, token, None] for token in ids],
                "weight_versions": [{"version": self.label, "start": 0, "end": length}],
            }
        return {"output_ids": ids, "meta_info": meta_info}

    async def _abort(self, request: web.Request) -> web.Response:
        rid = (await request.json())["rid"]
        self.calls.append(("abort_request", {"rid": rid}))
        self._held.setdefault(rid, asyncio.Event()).set()
        self.aborted.set()
        return web.Response()

    async def _model_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.label, "model_type": self.model_type})

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"max_model_len": self.context_tokens}]})

    async def _server_info(self, request: web.Request) -> web.Response:
        if self.hanging:
            await self._stopping.wait()
        states = [{"effective_max_running_requests_per_dp": 4}]
        described = {"version": self.version, "tp_size": 1, "dp_size": 1}
        sizes = {"max_total_num_tokens": 1000, "max_req_input_len": self.max_prompt_tokens}
        return web.json_response({**described, "internal_states": states, **sizes})

    async def _loads(self, request: web.Request) -> web.Response:
        return web.json_response({"loads": [{"max_running_requests": self.max_running_requests}]})

    async def _ready(self, request: web.Request) -> web.Response:
        return web.Response(status=503 if self.is_paused else 200)

    async def _control(self, request: web.Request) -> web.Response:
        path, payload = request.match_info["path"], await request.json()
        self.calls.append((path, payload))
        self.received.set()
        if path in self.hanging:
            await self._stopping.wait()
        message = self.refusals.get(path) or self._refusal(path)
        if message is not None:
            return web.json_response({"success": False, "message": message}, status=400)
        if path in ("pause_generation", "continue_generation"):
            self.is_paused = path == "pause_generation"
        if path in ("begin_weight_update", "end_weight_update"):
            self.in_session = path == "begin_weight_update"
        if path.startswith("update_weights_from_") and payload["weight_version"] is not None:
            self.label = payload["weight_version"]
        if path == "weights_checker":
            return web.json_response({"success": True, "ranks": [{"checksums": self.checksums}]})
        return web.json_response({"success": True, "message": "Success"})

    def _refusal(self, path: str) -> str | None:
        if path == "begin_weight_update" and self.in_session:
            return "a weight-update session is already open; call end_weight_update() first"
        if path in ("update_weights_from_distributed", "end_weight_update") and not self.in_session:
            return "no weight-update session is open"
        return None


@dataclass
class Served:
    """A hub in this process, and a client of it."""

    hub: Hub
    url: str
    http: aiohttp.ClientSession

    async def post(self, path: str, body: Any = None, **options: Any) -> tuple[int, Any]:
        async with self.http.post(self.url + path, json=body, **options) as response:
            return response.status, await response.json()

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.http.get(self.url + path) as response:
            return response.status, await response.json()

    async def delete(self, path: str) -> tuple[int, Any]:
        async with self.http.delete(self.url + path) as response:
            return response.status, await response.json()

    async def generate(self, prompt: list[int], max_new_tokens: int = 8, **options: Any) -> tuple[int, Any]:
        body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": max_new_tokens}}
        return await self.post("/generate", body, **options)

    async def until_ready(self, num_engines: int) -> None:
        await self.wait_until(lambda: len(self.hub.registry.routable) == num_engines, description="all engines are ready")

    async def wait_until(self, is_true: Callable[[], bool], *, description: str) -> None:
        try:
            async with asyncio.timeout(20):
                while not is_true():  # noqa: ASYNC110 - what is waited for has no event
                    await asyncio.sleep(0.005)
        except TimeoutError:
            pytest.fail(f"did not happen: {description}")


@dataclass
class Trainer:
    """The trainer's side of the exchange, without tensors. It listens where the engines would join it."""

    served: Served
    port: int
    group_name: str = ""
    epoch: str = field(default="epoch-1")

    async def form_group(self, epoch: str = "epoch-1", **options: Any) -> tuple[int, Any]:
        self.epoch = epoch
        body = {"epoch": epoch, "master_address": "127.0.0.1", "master_port": self.port, "backend": "gloo", **options}
        status, group = await self.served.post("/weight_groups", body)
        if status == 200:
            self.group_name = group["group_name"]
            await self.served.post(f"/weight_groups/{self.group_name}/ready")
        return status, group

    async def begin(self, version: int, mode: str = "in_place", *, rolling: bool = False) -> tuple[int, Any]:
        body = {"group_name": self.group_name, "version": version, "mode": mode, "rolling": rolling}
        return await self.served.post("/weight_updates", body)

    async def load(self, update_id: str, *, is_last: bool, **bucket: Any) -> tuple[int, Any]:
        bucket = {"is_last": is_last, **(bucket or {"names": ["w"], "dtypes": ["float32"], "shapes": [[2]]})}
        return await self.served.post(f"/weight_updates/{update_id}/buckets", bucket)

    async def push(
        self, version: int, mode: str = "in_place", *, rolling: bool = False, checksums: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        status, begun = await self.begin(version, mode, rolling=rolling)
        assert status == 200, begun
        for is_last in (False, True):
            status, loaded = await self.load(begun["update_id"], is_last=is_last)
            if status != 200:
                return status, loaded
        return await self.served.post(f"/weight_updates/{begun['update_id']}/commit", {"checksums": checksums})


class EngineStarter:
    """Starts engines on ports of the system's choice, and kills them; a killed one can be started again on its port."""

    def __init__(self) -> None:
        self._runners: dict[FakeEngine, web.AppRunner] = {}

    async def __call__(self, engine: FakeEngine | None = None, port: int = 0) -> FakeEngine:
        engine = engine or FakeEngine()
        runner = web.AppRunner(engine.application(), shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port, reuse_address=True).start()
        engine.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._runners[engine] = runner
        return engine

    async def kill(self, engine: FakeEngine) -> None:
        engine.stop()
        await self._runners.pop(engine).cleanup()

    async def kill_all(self) -> None:
        while self._runners:
            await self.kill(next(iter(self._runners)))


@pytest.fixture
async def start_engine() -> AsyncIterator[EngineStarter]:
    starter = EngineStarter()
    yield starter
    await starter.kill_all()


@pytest.fixture
def serve_hub(redis_url: str, keys: Keys) -> Callable[..., Any]:
    """A context manager that serves a hub of the test's run; entering it again is a restart."""

    @asynccontextmanager
    async def serve(
        *urls: str, discovery: tuple[str, ...] = (), model_path: Path = Path("unused"), **section: Any
    ) -> AsyncIterator[Served]:
        section = {"probe_interval_s": 0.05, "generate_timeout_s": 30.0, "weight_update_timeout_s": 20.0} | section
        configuration = Configuration(
            run=RunSection(id=keys.run_id, directory="unused", model_path=str(model_path)),
            engines=EnginesSection(urls=urls, discovery=discovery),
            inference_hub=InferenceHubSection(**section),
            trainer=TrainerSection(num_updates=1),
        )
        async with redis_client(RedisSection(url=redis_url)) as store, open_hub(configuration, store) as hub:
            listener = socket.create_server(("127.0.0.1", 0))
            server = uvicorn.Server(server_settings(hub, stop_timeout_s=1))
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            async with aiohttp.ClientSession() as http:
                yield Served(hub, f"http://127.0.0.1:{listener.getsockname()[1]}", http)
            server.should_exit = True
            await serving

    return serve


@pytest.fixture
async def listening_port() -> AsyncIterator[int]:
    """A port where something accepts connections, as a trainer's rank 0 would."""
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()


@pytest.fixture
def make_trainer(listening_port: int) -> Callable[[Served], Trainer]:
    return lambda served: Trainer(served, listening_port)


@pytest.fixture
def weight_group(
    serve_hub: Callable[..., Any], start_engine: EngineStarter, make_trainer: Callable[[Served], Trainer]
) -> Callable[[], Any]:
    """A context manager: a hub, its one engine, which is ready, and a trainer that has formed a group with it."""

    @asynccontextmanager
    async def formed() -> AsyncIterator[tuple[Served, FakeEngine, Trainer]]:
        engine = await start_engine()
        async with serve_hub(engine.url) as served:
            await served.until_ready(1)
            trainer = make_trainer(served)
            await trainer.form_group()
            yield served, engine, trainer

    return formed


@pytest.fixture
def plan() -> type[Plan]:
    return Plan
