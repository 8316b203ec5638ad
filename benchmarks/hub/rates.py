"""Requests per second and core, and the latency that a router adds at half of that load."""

import asyncio
import statistics
import time
from dataclasses import dataclass, field

from benchmarks.hub.load import check_answer, closed_loop, connect, open_loop
from benchmarks.hub.messages import Shape, answer_body, request
from benchmarks.hub.routers import Router

WARM_UP_S = 0.5
OPEN_LOOP_CALLERS = 256


@dataclass
class Rate:
    """Rounds of one router: answers per second of wall clock, and per second of the router's CPU time."""

    per_s: list[float] = field(default_factory=list)
    per_cpu_s: list[float] = field(default_factory=list)

    @property
    def wall(self) -> float:
        return statistics.median(self.per_s)

    @property
    def per_core(self) -> float:
        return statistics.median(self.per_cpu_s)


async def rates(routers: list[Router], shape: Shape, *, connections: int, rounds: int, seconds: float) -> dict[str, Rate]:
    """Rounds alternate between the routers, so that a machine that gets slower or faster does so for all.

    Raises: RuntimeError if a router answers wrongly.
    """
    found = {router.name: Rate() for router in routers}
    for router in routers:
        await check_answer(router.port, request(router.port, shape, session=0), answer_body(shape))
    for index in range(rounds):
        for router in routers[index % len(routers) :] + routers[: index % len(routers)]:
            callers = await connect(router.port, connections)
            requests = [request(router.port, shape, session=session) for session in range(connections)]
            await closed_loop(callers, requests, seconds=WARM_UP_S)
            cpu_s, began = router.cpu_s, time.perf_counter()
            number, problems = await closed_loop(callers, requests, seconds=seconds)
            elapsed_s, cpu_s = time.perf_counter() - began, router.cpu_s - cpu_s
            if problems:
                raise RuntimeError(f"{router.name} failed {len(problems)} calls: {problems[0]}")
            found[router.name].per_s.append(number / elapsed_s)
            found[router.name].per_cpu_s.append(number / cpu_s)
            for caller in callers:
                caller.close()
            await asyncio.sleep(0.05)
    return found


@dataclass(frozen=True)
class AddedLatency:
    """Milliseconds over a call that goes to the engine directly."""

    p50: float
    p99: float


async def added_latency(
    ports: dict[str, int], shape: Shape, *, per_s: float, rounds: int, seconds: float
) -> dict[str, AddedLatency]:
    """`ports` has the engine's under the name "direct"."""
    latencies_ms: dict[str, list[tuple[float, float]]] = {name: [] for name in ports}
    for index in range(rounds):
        for name, port in ports.items():
            callers = await connect(port, OPEN_LOOP_CALLERS)
            requests = [request(port, shape, session=session) for session in range(OPEN_LOOP_CALLERS)]
            await closed_loop(callers, requests, seconds=WARM_UP_S)
            answers = await open_loop(callers, requests, per_s=per_s, seconds=seconds, seed=index)
            if answers.problems:
                raise RuntimeError(f"{name} failed {len(answers.problems)} calls: {answers.problems[0]}")
            quantiles = statistics.quantiles(answers.latencies_s, n=100)
            latencies_ms[name].append((quantiles[49] * 1e3, quantiles[98] * 1e3))
            for caller in callers:
                caller.close()
            await asyncio.sleep(0.05)
    medians = {name: [statistics.median(column) for column in zip(*rows, strict=True)] for name, rows in latencies_ms.items()}
    direct = medians["direct"]
    return {name: AddedLatency(p50 - direct[0], p99 - direct[1]) for name, (p50, p99) in medians.items() if name != "direct"}
