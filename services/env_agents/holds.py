"""Pauses new rollouts in every agent process of the run, as during an evaluation; running ones go on."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from services.env_agents.cancelling import cancel_all
from services.env_agents.identifiers import uuid7
from shared.ledger import AdmissionLedger

Hold = Callable[[], contextlib.AbstractAsyncContextManager[None]]


@contextlib.asynccontextmanager
async def held(ledger: AdmissionLedger, *, lease_s: float, passing: tuple[type[Exception], ...]) -> AsyncIterator[None]:
    """No process admits a new group within this block. If this process dies in it, the hold ends with its lease.

    Args: passing: errors of Redis that pass by themselves; only the first call raises them.
    """
    hold_id = uuid7()

    async def renew() -> None:
        while True:
            await asyncio.sleep(lease_s / 3)
            with contextlib.suppress(*passing):
                await ledger.hold(hold_id, lease_ms=int(1000 * lease_s))

    await ledger.hold(hold_id, lease_ms=int(1000 * lease_s))
    renewing = asyncio.create_task(renew())
    try:
        yield
    finally:
        await cancel_all([renewing])
        with contextlib.suppress(*passing):
            await ledger.hold(hold_id, lease_ms=0)
