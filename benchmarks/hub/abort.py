"""How long after its caller left a generate call still runs in a real engine."""

import asyncio
import statistics
import time
from dataclasses import dataclass

import aiohttp

from benchmarks.hub.kill import load_of

ROUNDS = 20
OUTPUT_TOKENS = 1_500
"""More than an engine samples before it is left."""
BEGIN_TIMEOUT_S = 60.0
END_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Aborted:
    """Milliseconds from the closed connection to an engine that runs nothing."""

    p50_ms: float
    max_ms: float


async def abort_some(hub_port: int, engine_port: int) -> Aborted:
    """Calls one after the other through the hub to an engine that has no other. Raises: TimeoutError."""
    timeout = aiohttp.ClientTimeout(total=BEGIN_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        seconds = [await abort_one(session, hub_port, engine_port, index) for index in range(ROUNDS)]
    return Aborted(statistics.median(seconds) * 1e3, max(seconds) * 1e3)


async def abort_one(session: aiohttp.ClientSession, hub_port: int, engine_port: int, index: int) -> float:
    sampling = {"max_new_tokens": OUTPUT_TOKENS, "ignore_eos": True}
    body = {"input_ids": [5 + index, *range(6, 14)], "sampling_params": sampling}
    call = asyncio.create_task(session.post(f"http://127.0.0.1:{hub_port}/generate", json=body))
    await until(session, engine_port, is_running=True, timeout_s=BEGIN_TIMEOUT_S)
    call.cancel()  # aiohttp closes the connection of a request that is cancelled.
    began = time.perf_counter()
    await asyncio.wait((call,))
    await until(session, engine_port, is_running=False, timeout_s=END_TIMEOUT_S)
    return time.perf_counter() - began


async def until(session: aiohttp.ClientSession, engine_port: int, *, is_running: bool, timeout_s: float) -> None:
    """Asks as fast as the engine answers."""
    async with asyncio.timeout(timeout_s):
        while True:
            load = await load_of(session, engine_port)
            if (load["num_running_reqs"] + load["num_waiting_reqs"] > 0) == is_running:
                return
