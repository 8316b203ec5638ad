"""Places for episodes of one environment in this process."""

import asyncio


class EpisodeSlots:
    """A bound on concurrent episodes that may change while they run.

    Used as an async context manager around one episode. `num_claimed` counts those inside and those that wait.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._num_inside = 0
        self._waiters: list[asyncio.Future[None]] = []
        self.num_claimed = 0

    def can_claim(self, num_episodes: int) -> bool:
        """Whether so many episodes would all find a place at once; a group larger than the bound may start on its own."""
        return self.num_claimed == 0 or self.num_claimed + num_episodes <= self._limit

    def resize(self, limit: int) -> None:
        """Changes the bound; episodes inside are not disturbed."""
        self._limit = limit
        self._wake()

    async def __aenter__(self) -> None:
        self.num_claimed += 1
        try:
            while self._num_inside >= self._limit:
                await self._wait()
        except asyncio.CancelledError:
            self.num_claimed -= 1
            self._wake()
            raise
        self._num_inside += 1

    async def __aexit__(self, *_: object) -> None:
        self._num_inside -= 1
        self.num_claimed -= 1
        self._wake()

    async def _wait(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        finally:
            self._waiters.remove(waiter)

    def _wake(self) -> None:
        """Wakes as many as there are places; each looks again, so one too many does no harm."""
        for waiter in self._waiters[: max(0, self._limit - self._num_inside)]:
            if not waiter.done():
                waiter.set_result(None)
