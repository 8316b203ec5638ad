"""How late an event loop is: what blocks it delays every episode or call that it serves."""

import asyncio
import time
from collections.abc import Callable
from typing import Final

LAG_BUCKETS_S: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10)
_INTERVAL_S = 0.1


async def watch_loop_lag(observe: Callable[[float], object], *, interval_s: float = _INTERVAL_S) -> None:
    """Reports, until it is cancelled, by how many seconds a wake-up every `interval_s` came too late."""
    while True:
        due = time.perf_counter() + interval_s
        await asyncio.sleep(interval_s)
        observe(max(0.0, time.perf_counter() - due))
