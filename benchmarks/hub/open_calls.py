"""10,000 generations open at once: none may fail, and memory has to come back."""

import asyncio
from dataclasses import dataclass

from benchmarks.hub.load import Caller, connect
from benchmarks.hub.messages import Shape, request
from benchmarks.hub.routers import Router

CONNECT_AT_ONCE = 500
SETTLE_S = 12.0
"""Until a router has noticed that its callers left, and given back what it gives back."""


@dataclass(frozen=True)
class OpenCalls:
    """Resident MiB before, at most while they were open, and after."""

    failed: int
    base_mb: float
    peak_mb: float
    after_mb: float


async def open_calls(router: Router, shape: Shape, *, number: int, deadline_s: float) -> OpenCalls:
    """One connection and one call each, all open before the first is answered, if the engine's delay is long enough."""
    base_mb = peak_mb = router.resident_mb
    callers: list[Caller] = []
    answers: list[asyncio.Future[str | None]] = []
    for start in range(0, number, CONNECT_AT_ONCE):
        batch = await connect(router.port, min(CONNECT_AT_ONCE, number - start))
        answers += [caller.send(request(router.port, shape, session=start + index)) for index, caller in enumerate(batch)]
        callers += batch
    pending: set[asyncio.Future[str | None]] = set(answers)
    until = asyncio.get_running_loop().time() + deadline_s
    while pending and asyncio.get_running_loop().time() < until:
        peak_mb = max(peak_mb, router.resident_mb)
        _, pending = await asyncio.wait(pending, timeout=0.25)
    failed = sum(1 for answer in answers if not answer.done() or answer.result() is not None)
    for caller in callers:
        caller.close()
    await asyncio.sleep(SETTLE_S)
    return OpenCalls(failed, base_mb, peak_mb, router.resident_mb)
