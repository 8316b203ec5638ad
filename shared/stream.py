"""The trainer's end of the trajectory stream.

Entries are written by the ledger's `finish` (shared/ledger.py) and leave the stream when the ledger acknowledges or discards
their group. Delivery is at least once: a trainer that restarts reads again what its predecessor had not acknowledged.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import redis

from shared import trajectory as trajectories
from shared.errors import RecordError
from shared.keys import CONSUMER_GROUP, CONSUMER_NAME, Keys
from shared.ledger import TrainingLedger
from shared.trajectory import Trajectory


@dataclass(frozen=True)
class Delivery:
    """One trajectory as the stream delivered it; `entry_id` lets any rank fetch it again."""

    entry_id: str
    trajectory: Trajectory


class TrajectoryConsumer:
    """Reads the stream as the run's one consumer.

    A record that cannot be read goes to the dead-letter stream with the reason, and its group is discarded.
    """

    PAGE: ClassVar = 64
    """Entries of one read."""

    def __init__(self, client: redis.Redis, keys: Keys, ledger: TrainingLedger) -> None:
        self._client = client
        self._keys = keys
        self._ledger = ledger

    def redelivered(self) -> Iterator[Delivery]:
        """What an earlier trainer of this run read and did not acknowledge, oldest first."""
        after = "0"
        while True:
            entries = self._read(after, block_ms=None)
            if not entries:
                return
            yield from self._decoded(entries)
            after = entries[-1][0].decode()

    def read(self, *, block_ms: int) -> list[Delivery]:
        """New trajectories; an empty list if none came within `block_ms`."""
        return list(self._decoded(self._read(">", block_ms=block_ms)))

    def fetch(self, entry_ids: Sequence[str]) -> list[Trajectory]:
        """The trajectories of known entries, in the order asked for: how each rank gets its own share.

        Raises: RecordError if an entry is no longer in the stream.
        """
        pipeline = self._client.pipeline(transaction=False)
        for entry_id in entry_ids:
            pipeline.xrange(self._keys.trajectories, entry_id, entry_id)
        found = []
        for entry_id, entries in zip(entry_ids, pipeline.execute(), strict=True):
            if not entries:
                raise RecordError(f"entry {entry_id} is no longer in the trajectory stream")
            found.append(trajectories.decode(entries[0][1][b"trajectory"]))
        return found

    def _read(self, after: str, *, block_ms: int | None) -> list[tuple[bytes, dict[bytes, bytes]]]:
        reply: Any = self._client.xreadgroup(
            CONSUMER_GROUP, CONSUMER_NAME, {self._keys.trajectories: after}, count=self.PAGE, block=block_ms
        )
        return reply[0][1] if reply else []

    def _decoded(self, entries: Sequence[tuple[bytes, dict[bytes, bytes]]]) -> Iterator[Delivery]:
        for entry_id, fields in entries:
            if not fields:  # Removed from the stream while it was pending: its group was discarded.
                self._client.xack(self._keys.trajectories, CONSUMER_GROUP, entry_id)
                continue
            try:
                yield Delivery(entry_id.decode(), trajectories.decode(fields[b"trajectory"]))
            except (RecordError, KeyError) as error:
                self._ledger.bury(entry_id.decode(), str(error))
