"""The ledger in a real Redis under a virtual clock: the clock stands still while Redis answers."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Iterable
from typing import Any, Self

import redis
import redis.asyncio

from benchmarks.asynchrony.modelled_environment import World
from benchmarks.asynchrony.virtual_time import virtual_loop
from shared.keys import Keys
from shared.ledger import AdmissionLedger, Ending, GroupRecord, Receipt
from shared.trajectory import Trajectory

LONG_MS = 10_000_000_000
"""A lease longer than any run: leases expire by Redis's clock, which is real."""


class CountedRedis(redis.asyncio.Redis):
    """The clock stands still until Redis has answered. One connection, so that answers come in the order of the questions."""

    async def initialize(self) -> Self:
        with virtual_loop().real_io():
            return await super().initialize()

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        with virtual_loop().real_io():
            return await super().execute_command(*args, **options)  # type: ignore[no-untyped-call]


class WatchedLedger(AdmissionLedger):
    """The agents' ledger; says when a group may have become ready, as Redis would tell a trainer that blocks on the stream.

    Leases are renewed in virtual time and expire by Redis's clock, which is real; so they are long.
    """

    def __init__(self, client: redis.asyncio.Redis, keys: Keys, world: World, endings: "Endings") -> None:
        super().__init__(client, keys)
        self._endings = endings
        self._world = world
        self._num_finished: Counter[str] = Counter()
        self.group_by_trajectory: dict[str, str] = {}

    async def load_scripts(self) -> None:
        """Into a Redis that may not have them: a call that has to load its script first is overtaken by others."""
        for script in self._scripts.values():
            await self._client.script_load(script.script)

    async def admit(
        self, *, group_id: str, environment: str, group_size: int, owner: str, lease_ms: int, num_needed: int | None = None
    ) -> GroupRecord | None:
        return await super().admit(
            group_id=group_id,
            environment=environment,
            group_size=group_size,
            owner=owner,
            lease_ms=LONG_MS,
            num_needed=num_needed,
        )

    async def renew(self, *, owner: str, lease_ms: int, group_ids: Iterable[str]) -> list[str]:
        return await super().renew(owner=owner, lease_ms=LONG_MS, group_ids=group_ids)

    async def endings(self) -> AsyncGenerator[Ending, None]:
        while True:
            yield await self._endings.get()

    async def finish(self, trajectory: Trajectory, *, num_needed: int | None = None, verdict: str = "") -> Receipt:
        receipt = await super().finish(trajectory, num_needed=num_needed, verdict=verdict)
        self.group_by_trajectory[trajectory.trajectory_id] = trajectory.group_id
        self._num_finished[trajectory.group_id] += 1
        if self._num_finished[trajectory.group_id] >= self._world.system.group_size:
            self._endings.receive()
            self._world.something_new.set()
        return receipt


class Endings:
    """Redis's messages about groups that ended while they ran, received before the clock goes on."""

    def __init__(self, client: redis.Redis, keys: Keys) -> None:
        self._client = client
        self._channel = keys.endings
        self._pubsub = client.pubsub(ignore_subscribe_messages=True)  # type: ignore[no-untyped-call]
        self._pubsub.subscribe(self._channel)
        self._queue: asyncio.Queue[Ending] = asyncio.Queue()
        self.get = self._queue.get

    def receive(self) -> None:
        """Everything that was published up to now."""
        self._client.publish(self._channel, "bench-marker -")
        while True:
            message = self._pubsub.get_message(timeout=10)
            if message is None:
                continue
            reason, _, group_id = message["data"].decode().partition(" ")
            if reason == "bench-marker":
                return
            self._queue.put_nowait(Ending(reason, group_id))
