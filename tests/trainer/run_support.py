"""A run around the trainer's process without engines: a hub that accepts every push, and agents that finish episodes at once."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import redis.asyncio

from shared import trajectory as trajectories
from shared.keys import Keys
from shared.ledger import AdmissionLedger
from tests.trainer.records import trajectory

BATCH_GROUPS, GROUP_SIZE = 3, 2
REPOSITORY = Path(__file__).parents[2]


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
        if path.endswith("/buckets") and body["is_last"]:
            self.versions.append(self.pending)
            times = {"pause_s": 0.01, "pause_call_s": 0.0, "load_s": 0.0, "verify_s": 0.0, "resume_s": 0.0}
            report = {"version": self.pending, "engines": [], "left_out": {}, "is_verified": True, **times}
            return {"state": "committed", "report": report}
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


@contextmanager
def serving_hub():
    with AcceptingHub() as hub:
        thread = threading.Thread(target=hub.serve_forever)
        thread.start()
        yield hub
        hub.shutdown()
        thread.join()


class InstantAgents(threading.Thread):
    """Takes every place that the ledger gives and fills it with finished episodes of the version that admitted the group.

    The n-th group has the same tokens and rewards in every run. All episodes of a batch differ in length, so their order in it does
    not depend on when they came.
    """

    def __init__(self, redis_url, keys: Keys, *, async_generation_ratio=1.0, alter=None):
        """Args: alter: from the group's number, the sample index and the trajectory to the record written instead."""
        super().__init__()
        self._redis_url, self._keys = redis_url, keys
        self._ratio = async_generation_ratio
        self._alter = alter or (lambda number, index, trajectory: trajectories.encode(trajectory))
        self._is_over = threading.Event()
        self._num_groups = 0
        self.version_by_group = {}
        """That sampled its tokens."""

    def run(self):
        asyncio.run(self._work())

    def stop(self):
        self._is_over.set()
        self.join()

    async def _work(self):
        async with redis.asyncio.Redis.from_url(self._redis_url) as client:
            ledger = AdmissionLedger(client, self._keys)
            await ledger.configure(async_generation_ratio=self._ratio, batch_groups=BATCH_GROUPS)
            while not self._is_over.is_set():
                group = await ledger.admit(
                    group_id=f"g{self._num_groups}", environment="test", group_size=GROUP_SIZE, owner="agents", lease_ms=60_000
                )
                if group is None:
                    await asyncio.sleep(0.02)
                    continue
                self.version_by_group[group.group_id] = group.admitted_version
                for index in range(GROUP_SIZE):
                    episode = self._episode(group, index)
                    record = self._alter(self._num_groups, index, episode)
                    await ledger._run("finish", group.group_id, index, record, "", "", episode.num_sampled_tokens)
                self._num_groups += 1

    def _episode(self, group, index):
        length = 1 + (self._num_groups % BATCH_GROUPS) * GROUP_SIZE + index
        return trajectory(
            [0, 0, 1, 0, *[1] * length],
            group_id=group.group_id,
            group_size=GROUP_SIZE,
            sample_index=index,
            reward=float(index % 2),
            version=group.admitted_version,
        )


@contextmanager
def working_agents(redis_url, keys, **settings):
    agents = InstantAgents(redis_url, keys, **settings)
    agents.start()
    try:
        yield agents
    finally:
        agents.stop()


def write_run_file(directory, *, keys, model_path, redis_url, hub):
    """The run file of a small run; its folder is the run directory."""
    path = directory / "run.yaml"
    path.write_text(
        json.dumps(
            {
                "run": {"id": keys.run_id, "directory": str(directory), "model_path": str(model_path)},
                "redis": {"url": redis_url},
                "rollout": {"rollout_batch_size": BATCH_GROUPS, "num_return_sequences_in_group": GROUP_SIZE},
                "engines": {"device": "cpu", "dtype": "float32"},
                "inference_hub": {"url": hub.address},
                "trainer": {
                    "num_updates": 4,
                    "dtype": "float32",
                    "learning_rate": 1e-4,
                    "max_logprob_mismatch": 100.0,
                    "generation_timeout_s": 60,
                    "weight_push": {"backend": "gloo", "timeout_s": 30},
                    "checkpoint": {"every_updates": 2},
                },
            }
        )
    )
    return path


class SmallDisk:
    """A tmpfs of a limited size."""

    def __init__(self, path, size):
        self.path = path
        path.mkdir()
        if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], capture_output=True).returncode != 0:
            pytest.skip("mounting a file system of limited size needs root")

    def grow(self, size):
        subprocess.run(["mount", "-o", f"remount,size={size}", str(self.path)], check=True)

    def unmount(self):
        subprocess.run(["umount", str(self.path)], check=True)


@contextmanager
def trainers():
    """Starts trainers, and ends those that still run."""
    processes = []

    def start(run_file, *overrides, launcher=(sys.executable,), program=(str(REPOSITORY / "trainer" / "train.py"),)):
        command = [*launcher, *program, "--config", str(run_file)]
        for override in overrides:
            command += ["--set", override]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
        environment.pop("LOCAL_RANK", None)
        processes.append(
            subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
            )
        )
        return processes[-1]

    yield start
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def finished(process):
    output, errors = process.communicate(timeout=200)
    return process.returncode, output, errors


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def living_lineage(run_directory):
    """Groups by version, the later line of a version counting."""
    return {line["version"]: line["group_ids"] for line in lines(run_directory / "lineage.jsonl")}
