"""Deadlines that end with a sentence of their own, and not with somebody else's TimeoutError."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from shared.errors import EpisodeError


class DeadlineError(EpisodeError):
    """The environment, or the whole episode, passed its deadline."""


@asynccontextmanager
async def deadline(seconds: float, what: str) -> AsyncIterator[None]:
    """Ends its block as DeadlineError after `seconds`; a TimeoutError of the environment's own passes through."""
    scope = asyncio.timeout(seconds)
    try:
        async with scope:
            yield
    except TimeoutError as error:
        if scope.expired():
            raise DeadlineError(f"{what} took longer than {seconds:g} s") from error
        raise
