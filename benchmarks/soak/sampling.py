"""One look at every process of a run, and at its Redis."""

import contextlib
import re
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

import httpx
import msgspec
import psutil
import redis

from benchmarks.live_run import LiveRun

TASKS: Final = re.compile(r"^headrace_(?:hub|agents)_tasks (?P<count>\S+)$", re.MULTILINE)
SIZE_BY_TYPE: Final = {b"hash": "hlen", b"zset": "zcard", b"list": "llen", b"stream": "xlen", b"set": "scard"}
TIMEOUT_S: Final = 10.0


class ProcessSample(msgspec.Struct, frozen=True):
    """Of a part, with the processes that it has started: an engine is three."""

    rss_mb: float
    num_files: int
    """Open file descriptors, connections among them."""
    num_connections: int
    num_threads: int
    num_tasks: int | None = None
    """Of its event loop; None where it tells none."""


class Sample(msgspec.Struct, frozen=True):
    at_s: float
    """Since the sampling began."""
    version: int
    processes: Mapping[str, ProcessSample]
    redis_memory_mb: float
    """What its allocator has given out, as INFO says."""
    redis_clients: int
    sizes: Mapping[str, int]
    """Key without the run's name → entries."""


def sample(live: LiveRun, client: redis.Redis, metrics_urls: Mapping[str, str], *, began: float) -> Sample:
    """Args: metrics_urls: of the parts that have one. began: on the monotonic clock."""
    tasks = {part: _num_tasks(url) for part, url in metrics_urls.items()}
    memory: Any = client.info("memory")
    clients: Any = client.info("clients")
    run_id = live.configuration.run.id
    version = client.hget(f"headrace:{{{run_id}}}:ledger", "version")
    return Sample(
        at_s=round(time.monotonic() - began, 1),
        version=int(version or 0),
        processes={part: _process(process, tasks.get(part)) for part, process in sorted(live.parts.items())},
        redis_memory_mb=round(memory["used_memory"] / 1e6, 2),
        redis_clients=clients["connected_clients"],
        sizes=sizes(client, f"headrace:{{{run_id}}}:"),
    )


def sizes(client: redis.Redis, prefix: str) -> dict[str, int]:
    """Entries of every key of the Redis, without `prefix`; a string has one."""
    keys = sorted(client.scan_iter("*", count=1000))
    found = {}
    for key in keys:
        command = SIZE_BY_TYPE.get(client.type(key))
        found[key.decode().removeprefix(prefix)] = int(getattr(client, command)(key)) if command else 1
    return found


def _process(process: psutil.Process, num_tasks: int | None) -> ProcessSample:
    totals: Counter[str] = Counter()
    for member in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            totals["rss"] += member.memory_info().rss
            totals["files"] += member.num_fds()
            totals["connections"] += len(member.net_connections())
            totals["threads"] += member.num_threads()
    return ProcessSample(
        rss_mb=round(totals["rss"] / 1e6, 2),
        num_files=totals["files"],
        num_connections=totals["connections"],
        num_threads=totals["threads"],
        num_tasks=num_tasks,
    )


def _num_tasks(url: str) -> int | None:
    match = TASKS.search(httpx.get(f"{url}/metrics", timeout=TIMEOUT_S, trust_env=False).raise_for_status().text)
    return int(float(match["count"])) if match else None
