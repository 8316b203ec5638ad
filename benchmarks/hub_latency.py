"""What the hub adds to a generate call: the same calls to one canned engine, directly and through the hub, in alternating rounds.

The engine, the hub and the caller are processes of their own, on loopback. A call has 512 token ids in and 256 out with
log-probabilities. The last line is a JSON object.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

INPUT_TOKENS = 512
START_TIMEOUT_S = 60.0


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.hub_latency",
        description=__doc__,
        epilog="example:\n  python -m benchmarks.hub_latency --rounds 20 --calls 200 --concurrency 16",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=10, help="rounds of each kind (default 10)")
    parser.add_argument("--calls", type=int, default=200, help="calls in a round (default 200)")
    parser.add_argument("--concurrency", type=int, default=1, help="calls at a time (default 1)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, served(Path(folder)) as (engine_url, hub_url):
        report = asyncio.run(measure(engine_url, hub_url, arguments.rounds, arguments.calls, arguments.concurrency))
    print(json.dumps(report))


@contextmanager
def served(folder: Path) -> Iterator[tuple[str, str]]:
    """A canned engine, a Redis and a hub. Yields the addresses of engine and hub."""
    from services.standalone.ports import free_ports
    from services.standalone.redis_server import redis_executable

    engine_port, hub_port = free_ports(2)
    engine_url, hub_url = f"http://127.0.0.1:{engine_port}", f"http://127.0.0.1:{hub_port}"
    socket = folder / "redis.sock"
    (folder / "config.json").write_text("{}")
    run_file = folder / "run.yaml"
    run_file.write_text(
        json.dumps(
            {
                "run": {"id": "hub-latency", "directory": str(folder), "model_path": str(folder)},
                "redis": {"url": f"unix://{socket}"},
                "engines": {"urls": [engine_url]},
                "inference_hub": {"port": hub_port},
                "trainer": {"num_updates": 1},
            }
        )
    )
    uvicorn = [sys.executable, "-m", "uvicorn", "benchmarks.canned_engine:application", "--port", str(engine_port)]
    commands = [
        [redis_executable(), "--port", "0", "--unixsocket", str(socket), "--dir", str(folder), "--save", "", "--appendonly", "yes"],
        [*uvicorn, "--loop", "uvloop", "--no-access-log", "--lifespan", "off", "--log-level", "error"],
        [sys.executable, "-m", "services.inference_hub", "--config", str(run_file)],
    ]
    with ExitStack() as stack:
        for command in commands:
            process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.DEVNULL))
            stack.callback(process.terminate)
            wait_until(socket.exists, "Redis listens")
        wait_until(lambda: is_ready(hub_url), "the hub is ready")
        yield engine_url, hub_url


def wait_until(is_true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not is_true():
        if time.monotonic() > deadline:
            raise TimeoutError(f"within {START_TIMEOUT_S:g} s it should be that {what}")
        time.sleep(0.1)


def is_ready(url: str) -> bool:
    import httpx

    try:
        return httpx.get(f"{url}/ready", timeout=5, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


async def measure(engine_url: str, hub_url: str, rounds: int, calls: int, concurrency: int) -> dict[str, float]:
    """Milliseconds. Rounds alternate, so that a machine that gets slower or faster does so for both."""
    import aiohttp

    request = {
        "input_ids": list(range(1000, 1000 + INPUT_TOKENS)),
        "sampling_params": {"max_new_tokens": 256, "temperature": 1.0},
        "return_logprob": True,
    }
    body = json.dumps(request, separators=(",", ":")).encode()
    latencies_ms: dict[str, list[float]] = {engine_url: [], hub_url: []}
    elapsed_s = dict.fromkeys(latencies_ms, 0.0)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def caller(url: str, count: int) -> None:
            for _ in range(count):
                began = time.perf_counter()
                async with session.post(f"{url}/generate", data=body, headers={"X-Session-Id": "s"}) as response:
                    await response.read()
                    assert response.status == 200
                latencies_ms[url].append((time.perf_counter() - began) * 1e3)

        for index in range(rounds + 1):
            if index == 1:  # The first round of each warms up.
                latencies_ms[engine_url].clear()
                latencies_ms[hub_url].clear()
                elapsed_s = dict.fromkeys(latencies_ms, 0.0)
            for url in (engine_url, hub_url):
                began = time.perf_counter()
                await asyncio.gather(*(caller(url, calls // concurrency) for _ in range(concurrency)))
                elapsed_s[url] += time.perf_counter() - began
    return report(latencies_ms[engine_url], latencies_ms[hub_url]) | {
        "concurrency": concurrency,
        "calls": len(latencies_ms[hub_url]),
        "hub_calls_per_s": round(len(latencies_ms[hub_url]) / elapsed_s[hub_url], 1),
    }


def report(direct_ms: list[float], hub_ms: list[float]) -> dict[str, float]:
    figures = {}
    for name, percent in (("p50", 50), ("p99", 99)):
        direct, through_hub = (statistics.quantiles(times, n=100)[percent - 1] for times in (direct_ms, hub_ms))
        figures |= {
            f"added_ms_{name}": round(through_hub - direct, 3),
            f"direct_ms_{name}": round(direct, 3),
            f"hub_ms_{name}": round(through_hub, 3),
        }
    return figures


if __name__ == "__main__":
    main()
