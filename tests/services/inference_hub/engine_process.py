"""An engine in a process of its own, to be killed: SGLang's control API over HTTP, and real gloo groups that bring its weights.

    python engine_process.py PORT [FAULT PATH COUNT]

Its policy samples the first element of each weight, so an answer shows which weights it was made with, mixtures too. When PATH is
called for the COUNT-th time the process takes FAULT, `kill` or `stop`, itself.
"""

import asyncio
import hashlib
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
import torch.distributed as dist
from aiohttp import web
from torch.distributed import HashStore, PrefixStore, distributed_c10d, rendezvous

TIMEOUT = timedelta(minutes=30)
"""Of its process groups, as SGLang's."""


class Engine:
    def __init__(self, fault):
        self.fault = fault
        self.label = "0"
        self.weights = {
            "a.weight": torch.zeros(3, 4),
            "b.weight": torch.zeros(5),
            "c.weight": torch.zeros(6),
            "d.weight": torch.zeros(7),
        }
        self.groups = {}
        self.in_session = False
        self.running = asyncio.Event()
        self.running.set()
        self.scheduler = ThreadPoolExecutor(1)
        """Like SGLang's: one thing at a time, while HTTP goes on."""

    def application(self):
        application = web.Application()
        application.add_routes(
            [
                web.get("/server_info", self.server_info),
                web.get("/model_info", self.model_info),
                web.get("/ready", self.ready),
                web.post("/generate", self.generate),
                web.post("/{path}", self.control),
            ]
        )
        return application

    async def server_info(self, request):
        await asyncio.get_running_loop().run_in_executor(self.scheduler, lambda: None)
        return web.json_response({"version": "0.5.23", "tp_size": 1, "dp_size": 1})

    async def model_info(self, request):
        return web.json_response({"weight_version": self.label})

    async def ready(self, request):
        return web.Response(status=200 if self.running.is_set() else 503)

    async def generate(self, request):
        body = await request.json()
        await self.running.wait()
        ids = [int(weight.flatten()[0]) for weight in self.weights.values()]
        meta_info = {
            "id": body["rid"],
            "finish_reason": {"type": "length", "length": len(ids)},
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(ids),
            "cached_tokens": 0,
            "output_token_logprobs": [[-1.0, token, None] for token in ids],
            "weight_versions": [{"version": self.label, "start": 0, "end": len(ids)}],
        }
        return web.json_response({"output_ids": ids, "meta_info": meta_info})

    async def control(self, request):
        path, body = request.match_info["path"], await request.json()
        self.take_fault(path)
        if path in ("pause_generation", "continue_generation"):
            (self.running.clear if path == "pause_generation" else self.running.set)()
            return web.json_response({"success": True})
        work = getattr(self, path)
        try:
            answer = await asyncio.get_running_loop().run_in_executor(self.scheduler, work, body)
        except RuntimeError as error:
            return web.json_response({"success": False, "message": f"Failed to receive weights: {error}"}, status=400)
        if isinstance(answer, str):
            return web.json_response({"success": False, "message": answer}, status=400)
        return web.json_response({"success": True, **(answer or {})})

    def take_fault(self, path):
        if self.fault is None or self.fault[1] != path:
            return
        kind, _, count = self.fault
        self.fault = (kind, path, count - 1) if count > 1 else None
        if count == 1:
            os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[kind])

    def init_weights_update_group(self, body):
        rank, size, name = body["rank_offset"], body["world_size"], body["group_name"]
        address = f"tcp://{body['master_address']}:{body['master_port']}"
        store, rank, size = next(rendezvous(address, rank, size, timeout=TIMEOUT))
        group, _ = distributed_c10d._new_process_group_helper(
            size, rank, [], dist.Backend("gloo"), PrefixStore(name, store), group_name=name, timeout=TIMEOUT
        )
        distributed_c10d._world.pg_group_ranks[group] = {index: index for index in range(size)}
        self.groups[name] = group

    def destroy_weights_update_group(self, body):
        if group := self.groups.pop(body["group_name"], None):
            dist.destroy_process_group(group)

    def begin_weight_update(self, body):
        if self.in_session:
            return "a weight-update session is already open; call end_weight_update() first"
        self.in_session = True
        return None

    def end_weight_update(self, body):
        if not self.in_session:
            return "no weight-update session is open"
        self.in_session = False
        return None

    def update_weights_from_distributed(self, body):
        if not self.in_session:
            return "update_weights_from_distributed must run between begin_weight_update() and end_weight_update()"
        sizes = [torch.Size(shape).numel() * 4 for shape in body["shapes"]]
        data = torch.empty(sum(sizes), dtype=torch.uint8)
        dist.broadcast(data, src=0, group=self.groups[body["group_name"]])
        for name, part, shape in zip(body["names"], data.split(sizes), body["shapes"], strict=True):
            if self.weights[name].shape != torch.Size(shape):
                return f"Failed to update parameter online: {name} has another shape"
            self.weights[name] = part.view(torch.float32).reshape(shape).clone()
        if body["weight_version"] is not None:
            self.label = body["weight_version"]
        return None

    def weights_checker(self, body):
        checksums = {name: hashlib.sha256(weight.numpy().tobytes()).digest()[:8].hex() for name, weight in self.weights.items()}
        return {"ranks": [{"checksums": checksums}]}


def main(port, *fault):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    engine = Engine((fault[0], fault[1], int(fault[2])) if fault else None)
    web.run_app(engine.application(), host="127.0.0.1", port=int(port), print=None, handle_signals=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
