"""Cancelling tasks for good."""

import asyncio
from collections.abc import Iterable

_AGAIN_S = 1.0


async def cancel_all(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancels until they have ended: code of an environment may lose a cancellation, as `wait_for` before Python 3.12 can."""
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=_AGAIN_S)
