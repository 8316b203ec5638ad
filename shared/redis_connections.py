"""Connections to Redis whose callers can be cancelled at any moment.

redis-py sends a command in `asyncio.wait_for`, which before Python 3.12 loses a cancellation that arrives just as the command has
been sent (gh-86296): a task that is cancelled once would go on for ever.
"""

import asyncio
from collections.abc import Iterable

from redis.asyncio.connection import AbstractConnection, ConnectionPool


def keep_cancellations(pool: ConnectionPool) -> None:
    """Lets no connection that `pool` makes from now on lose a cancellation."""
    known = pool.connection_class
    pool.connection_class = type(f"Cancellable{known.__name__}", (_Cancellable, known), {})


class _Cancellable(AbstractConnection):
    async def send_packed_command(self, command: bytes | str | Iterable[bytes], check_health: bool = True) -> None:
        task = asyncio.current_task()
        assert task is not None
        num_cancellations = task.cancelling()
        await super().send_packed_command(command, check_health)
        if task.cancelling() > num_cancellations:
            await self.disconnect(nowait=True)  # Its next user would read the answer to this command.
            raise asyncio.CancelledError
