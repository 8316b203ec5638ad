"""Serves engine models over SGLang's HTTP API, in virtual time that goes `--speed` times as fast as the clock.

The first token id of a prompt is the number of its episode, and the last one is the length of the answer, which no router reads.
Answers carry the numbers that routers use and no tokens, so that the machine's time goes to the router.
"""

import argparse
import asyncio
import json
import time
from typing import Any

import uvicorn

from benchmarks.hub.engine_model import MAX_RUNNING, EngineModel, ModelRequest
from benchmarks.hub.makespan import MAX_NEW_TOKENS
from benchmarks.hub.messages import CONTROL_ANSWERS

TICK_S = 0.004


class SimulatedEngine:
    """An ASGI application in front of one model."""

    def __init__(self, speed: float) -> None:
        self.model = EngineModel()
        self._speed = speed
        self._began = time.perf_counter()
        self._answers: dict[ModelRequest, asyncio.Future[None]] = {}

    def tick(self) -> None:
        for request in self.model.advance((time.perf_counter() - self._began) * self._speed):
            future = self._answers.pop(request, None)
            if future is not None and not future.done():
                future.set_result(None)

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        await self._send(send, await self._answer(scope["path"], body))

    async def _answer(self, path: str, body: bytes) -> dict[str, Any]:
        if path == "/v1/loads":
            return {"loads": [self._load()]}
        if path == "/server_info":
            return CONTROL_ANSWERS[path] | {"max_total_num_tokens": self.model.cache_tokens}
        if path != "/generate":
            return CONTROL_ANSWERS.get(path, {})
        request = request_in(body)
        self.model.submit(request)
        self._answers[request] = asyncio.get_running_loop().create_future()
        await self._answers[request]
        return {
            "output_ids": [],
            "meta_info": {
                "finish_reason": {"type": "stop"},
                "prompt_tokens": request.prompt_tokens,
                "completion_tokens": request.output_tokens,
                "cached_tokens": request.cached_tokens,
                "num_retractions": request.num_retractions,
                "output_token_logprobs": [],
                "weight_versions": [{"version": "0", "start": 0, "end": request.output_tokens}],
            },
        }

    def _load(self) -> dict[str, Any]:
        return {
            "num_running_reqs": self.model.num_running,
            "num_waiting_reqs": len(self.model.waiting),
            "max_running_requests": MAX_RUNNING,
            "token_usage": self.model.used_tokens / self.model.cache_tokens,
        }

    @staticmethod
    async def _send(send: Any, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def request_in(body: bytes) -> ModelRequest:
    """What a request asks, without decoding thousands of token ids: nothing else of it has an effect here."""
    array = body[body.index(b'"input_ids"') :]
    ids = array[array.index(b"[") + 1 : array.index(b"]")]
    first, last = ids.split(b",", 1)[0], ids.rsplit(b",", 1)[-1]
    return ModelRequest(int(first), ids.count(b",") + 1, int(last), MAX_NEW_TOKENS)


async def serve(ports: list[int], speed: float) -> None:
    engines = [SimulatedEngine(speed) for _ in ports]
    async with asyncio.TaskGroup() as tasks:
        for engine, port in zip(engines, ports, strict=True):
            settings = uvicorn.Config(engine, port=port, lifespan="off", log_level="error", timeout_keep_alive=60)
            tasks.create_task(uvicorn.Server(settings).serve())
        while True:
            await asyncio.sleep(TICK_S)
            for engine in engines:
                engine.tick()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hub.simulated_engine", description=__doc__)
    parser.add_argument("--ports", required=True, help="one engine each, with commas between")
    parser.add_argument("--speed", type=float, default=10.0)
    arguments = parser.parse_args()
    asyncio.run(serve([int(port) for port in arguments.ports.split(",")], arguments.speed))


if __name__ == "__main__":
    main()
