"""A run around the trainer's process without engines: a hub that accepts every push, and agents that finish episodes at once."""

import asyncio
import json
import threading
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import redis.asyncio

from shared.keys import Keys
from shared.ledger import AdmissionLedger
from tests.trainer.records import recorded


class AcceptingHub(ThreadingHTTPServer):
    """Its groups have the trainer alone, so that broadcasts go nowhere. `versions` are those committed, in order."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _HubHandler)
        self.versions = []
        self.pending = None
        self.epoch = "initial"

    @property
    def address(self):
        return f"http://127.0.0.1:{self.server_port}"

    def answer(self, path, body):
        if path == "/engines":
            return [{"id": "e", "url": "http://127.0.0.1:9", "state": "ready"}]
        if path == "/usage":
            return [
                {
                    "id": "e",
                    "tensor_parallel_size": 1,
                    "max_running_calls": 8,
                    "max_tokens": None,
                    "ready_s": 9.0,
                    "idle_s": 3.0,
                    "used_s": 2.0,
                }
            ]
        if path == "/weight_groups":
            self.epoch = body["epoch"]
            return {"group_name": f"headrace-{body['epoch']}", "world_size": 1, "engines": []}
        if path == "/weight_updates":
            self.pending = body["version"]
            return {"update_id": "u"}
        if path.endswith("/commit"):
            self.versions.append(self.pending)
            times = {"pause_s": 0.01, "pause_call_s": 0.0, "load_s": 0.0, "verify_s": 0.0, "resume_s": 0.0}
            return {"version": self.pending, "engines": [], "left_out": {}, "is_verified": True, **times}
        if path == "/weights":
            return {"version": self.versions[-1], "epoch": self.epoch, "ready_engines": 1, "wanting_engines": []}
        return {}


class _HubHandler(BaseHTTPRequestHandler):
    def respond(self):
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "null")
        payload = json.dumps(self.server.answer(self.path, body)).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    do_GET = do_POST = do_DELETE = respond

    def log_message(self, *_):
        pass


class InstantAgents(threading.Thread):
    """Takes every place that the ledger gives and fills it with finished episodes of the version in force."""

    def __init__(self, redis_url, keys: Keys, *, group_size, batch_groups, async_generation_ratio):
        super().__init__()
        self._redis_url, self._keys = redis_url, keys
        self._group_size, self._batch_groups, self._ratio = group_size, batch_groups, async_generation_ratio
        self._is_over = threading.Event()

    def run(self):
        asyncio.run(self._work())

    def stop(self):
        self._is_over.set()
        self.join()

    async def _work(self):
        async with redis.asyncio.Redis.from_url(self._redis_url) as client:
            ledger = AdmissionLedger(client, self._keys)
            await ledger.configure(async_generation_ratio=self._ratio, batch_groups=self._batch_groups)
            while not self._is_over.is_set():
                group = await ledger.admit(
                    group_id=uuid.uuid4().hex, environment="test", group_size=self._group_size, owner="agents", lease_ms=60_000
                )
                if group is None:
                    await asyncio.sleep(0.02)
                    continue
                version = (await ledger.books()).version
                for index in range(self._group_size):
                    await ledger.finish(recorded(group, index, reward=float(index % 2), version=version))
