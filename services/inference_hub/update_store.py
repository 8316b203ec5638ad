"""What Redis holds of the exchange with the trainer, so that a hub that restarts knows what its predecessor was doing."""

from typing import Final, cast

import msgspec
from redis.asyncio import Redis

from shared.keys import Keys

TRAINER_FIELD: Final = "trainer"
UPDATE_FIELD: Final = "update"


class TrainerAddress(msgspec.Struct, frozen=True):
    """The trainer that formed the last weight group, and where its rank 0 listens while it lives."""

    epoch: str
    host: str
    port: int


class UpdateRecord(msgspec.Struct, frozen=True):
    """The last weight update, as it was at its last transition."""

    id: str
    version: int
    epoch: str
    state: str
    engine_urls: tuple[str, ...]
    deadline_unix_s: float
    """When the state counts as given up."""
    failure: str | None = None


class UpdateStore:
    """Fields of the run's key `weights`; version and epoch in force, in the same key, are the registry's."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis = redis
        self._keys = keys

    async def load(self) -> tuple[TrainerAddress | None, UpdateRecord | None]:
        fields = cast(dict[bytes, bytes], await self._redis.hgetall(self._keys.weights))
        trainer, update = fields.get(TRAINER_FIELD.encode()), fields.get(UPDATE_FIELD.encode())
        return (
            msgspec.json.decode(trainer, type=TrainerAddress) if trainer else None,
            msgspec.json.decode(update, type=UpdateRecord) if update else None,
        )

    async def save_trainer(self, trainer: TrainerAddress) -> None:
        await self._redis.hset(self._keys.weights, TRAINER_FIELD, msgspec.json.encode(trainer))

    async def save_update(self, update: UpdateRecord) -> None:
        await self._redis.hset(self._keys.weights, UPDATE_FIELD, msgspec.json.encode(update))
