"""`python -m benchmarks.hub`: the hub beside smg and sglang-router, in front of the same engines.

rates     answers per second of the router's CPU time, which is what one core gives, with 512 token ids in and 256 out and with
          4,096 and 1,024, at 32 and 512 connections; one canned engine answers at once
latency   what a router adds to a call, in ms, at half of the hub's rate: Poisson arrivals, each call timed from when it was due
open      10,000 calls open at once in front of an engine that takes seconds, twice; memory before, at most, and after each time
makespan  1,024 multi-turn episodes with long tails, on 4 simulated engines (engine_model.py has the model and its constants),
          against the best of smg's policies
kill      32 generations in flight on two real SGLang engines, one of which is killed; and how long after its caller left a
          generation still runs in the other one

Routers take turns on one core of their own, in rounds whose medians count; engine and caller have the other cores. The last line is
a JSON object.
"""

import argparse
import asyncio
import json
from collections.abc import Callable
from typing import Any

PARTS = ("rates", "latency", "open", "makespan", "kill")
CONNECTIONS = (32, 512)
NUM_OPEN = 10_000
OPEN_DELAY_S = 5.0
OPEN_DEADLINE_S = 120.0
SIMULATED_ENGINES = 4
SPEED = 10.0
"""Virtual seconds in a second."""
SMG_POLICIES = ("cache_aware", "manual", "power_of_two")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.hub",
        description=__doc__,
        epilog="examples:\n  python -m benchmarks.hub\n  python -m benchmarks.hub --parts rates --rounds 3 --seconds 1",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--parts", type=names_of(PARTS), default=PARTS, help="comma-separated (default: all)")
    parser.add_argument("--rounds", type=int, default=5, help="of each router and load (default 5)")
    parser.add_argument("--seconds", type=float, default=2.0, help="of one round (default 2)")
    arguments = parser.parse_args()

    import uvloop

    from benchmarks.hub.routers import leave_a_core_to_routers, raise_open_files

    raise_open_files()
    router_cores = leave_a_core_to_routers()
    figures: dict[str, float] = {}
    parts = {
        "rates": measure_rates,
        "latency": measure_latency,
        "open": measure_open,
        "makespan": measure_makespan,
        "kill": measure_kill,
    }
    for name in arguments.parts:
        figures |= uvloop.run(parts[name](router_cores, arguments.rounds, arguments.seconds))
    print(json.dumps(figures))


def names_of(known: tuple[str, ...]) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"must be of {', '.join(known)}, got {', '.join(unknown)}")
        return names

    return parse


def row(*cells: Any) -> None:
    print("  ".join(f"{cell:<16}" if index == 0 else f"{cell:>14}" for index, cell in enumerate(cells)), flush=True)


async def measure_rates(router_cores: set[int], rounds: int, seconds: float) -> dict[str, float]:
    """The ratio to smg is the least over the numbers of connections."""
    from benchmarks.hub.messages import Shape
    from benchmarks.hub.rates import rates
    from benchmarks.hub.routers import ROUTERS, processes

    figures = {}
    row("tokens in/out", "connections", "router", "per core s", "per s", "hub / router")
    for shape in (Shape(512, 256), Shape(4_096, 1_024)):
        ratios = []
        with processes(router_cores) as started:
            port = started.engine("--prompt-tokens", str(shape.prompt_tokens), "--output-tokens", str(shape.output_tokens))
            routers = [started.router(name, [port]) for name in ROUTERS]
            for connections in CONNECTIONS:
                found = await rates(routers, shape, connections=connections, rounds=rounds, seconds=seconds)
                for name, rate in found.items():
                    ratio = found["hub"].per_core / rate.per_core
                    row(shape.name, connections, name, f"{rate.per_core:,.0f}", f"{rate.wall:,.0f}", f"{ratio:.2f}")
                ratios.append(found["hub"].per_core / found["smg"].per_core)
        figures[f"rps_vs_smg_{shape.prompt_tokens}_{shape.output_tokens}"] = round(min(ratios), 2)
    return figures


async def measure_latency(router_cores: set[int], rounds: int, seconds: float) -> dict[str, float]:
    from benchmarks.hub.messages import Shape
    from benchmarks.hub.rates import added_latency, rates
    from benchmarks.hub.routers import ROUTERS, processes

    shape = Shape(512, 256)
    with processes(router_cores) as started:
        port = started.engine()
        routers = [started.router(name, [port]) for name in ROUTERS]
        found = await rates(routers[:1], shape, connections=CONNECTIONS[0], rounds=1, seconds=seconds)
        per_s = found["hub"].wall / 2
        ports = {"direct": port} | {router.name: router.port for router in routers}
        added = await added_latency(ports, shape, per_s=per_s, rounds=rounds, seconds=seconds)
    row("added latency", "calls/s", "router", "p50 ms", "p99 ms")
    for name, latency in added.items():
        row(shape.name, f"{per_s:,.0f}", name, f"{latency.p50:.2f}", f"{latency.p99:.2f}")
    hub, smg = added["hub"], added["smg"]
    return {
        "added_ms_p50": round(hub.p50, 3),
        "added_ms_p99": round(hub.p99, 3),
        "smg_added_ms_p50": round(smg.p50, 3),
        "smg_added_ms_p99": round(smg.p99, 3),
    }


async def measure_open(router_cores: set[int], rounds: int, seconds: float) -> dict[str, float]:
    from benchmarks.hub.messages import Shape
    from benchmarks.hub.open_calls import open_calls
    from benchmarks.hub.routers import processes

    shape = Shape(512, 256)
    row("open calls", "router", "failed", "base MiB", "peak MiB", "after MiB")
    bursts = {}
    for name in ("hub", "smg"):
        with processes(router_cores) as started:
            port = started.engine("--delay-s", str(OPEN_DELAY_S))
            router = started.router(name, [port])
            bursts[name] = [await open_calls(router, shape, number=NUM_OPEN, deadline_s=OPEN_DEADLINE_S) for _ in range(2)]
        for found in bursts[name]:
            row(f"{NUM_OPEN:,}", name, found.failed, *(f"{size:,.0f}" for size in (found.base_mb, found.peak_mb, found.after_mb)))
    first, second = bursts["hub"]
    return {
        "open_10k_failed": first.failed + second.failed,
        "open_10k_rss_mb": round(max(first.peak_mb, second.peak_mb), 1),
        "open_10k_base_mb": round(first.base_mb, 1),
        "open_10k_after_mb": round(first.after_mb, 1),
        "open_10k_after_second_mb": round(second.after_mb, 1),
    }


async def measure_makespan(router_cores: set[int], rounds: int, seconds: float) -> dict[str, float]:
    from benchmarks.hub.makespan import NUM_EPISODES, episodes, play
    from benchmarks.hub.routers import processes

    plans = episodes(NUM_EPISODES, seed=0)
    row("makespan", "policy", "virtual s", "prefix hits", "mean episode")
    makespans: dict[str, float] = {}
    for policy in ("hub", *SMG_POLICIES):
        with processes(router_cores) as started:
            ports = started.simulated_engines(SIMULATED_ENGINES, speed=SPEED)
            router = started.router("hub", ports) if policy == "hub" else started.router("smg", ports, policy=policy)
            played = await play(router.port, plans, speed=SPEED)
        row(router.name, policy, f"{played.makespan_s:,.0f}", f"{played.hit_rate:.0%}", f"{played.mean_episode_s:,.0f}")
        makespans[policy] = played.makespan_s
    best = min(makespans[policy] for policy in SMG_POLICIES)
    return {"makespan_vs_smg": round(makespans["hub"] / best, 3)}


async def measure_kill(router_cores: set[int], rounds: int, seconds: float) -> dict[str, float]:
    from benchmarks.hub.abort import ROUNDS, abort_some
    from benchmarks.hub.kill import kill_one
    from benchmarks.hub.routers import kill, processes

    with processes(router_cores) as started:
        engines = await asyncio.to_thread(started.real_engines, 2)
        ports = [port for port, _ in engines]
        router = started.router("hub", ports, settings={"generate_timeout_s": 600.0})
        found = await kill_one(router.port, ports, lambda: kill(engines[0][1]))
        aborted = await abort_some(router.port, ports[1])
    row("killed engine", "interrupted", "wrong answers", "resumed in s")
    row("SIGKILL", found.num_interrupted, found.num_wrong, f"{found.resume_s:.2f}")
    row("callers left", "calls", "p50 ms", "max ms")
    row("abort", ROUNDS, f"{aborted.p50_ms:.0f}", f"{aborted.max_ms:.0f}")
    return {
        "kill_engine_wrong": found.num_wrong,
        "kill_engine_resume_s": round(found.resume_s, 2),
        "abort_ms_p50": round(aborted.p50_ms, 1),
        "abort_ms_max": round(aborted.max_ms, 1),
    }


if __name__ == "__main__":
    main()
