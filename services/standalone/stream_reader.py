"""The trajectory stream as an onlooker reads it: by plain XREVRANGE and XREAD, which the trainer's consumer group never notices."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import redis

from shared import trajectory as trajectories
from shared.errors import RecordError
from shared.trajectory import Trajectory

PAGE: Final = 64
"""Entries of one read."""
FIRST_ID: Final = "0-0"


@dataclass(frozen=True)
class Entry:
    """One entry of the stream. `trajectory` is the reason, in words, where the record cannot be read."""

    entry_id: str
    trajectory: Trajectory | RecordError


Predicate = Callable[[Entry], bool]


class StreamReader:
    """Begins at the end of the stream: `newest` looks back from there, `read` goes on from there and misses nothing.

    Its place is an entry id that the first call learns, so entries that come between two reads, or while Redis is away, are in
    the next one. Every method raises redis.RedisError.
    """

    def __init__(self, client: redis.Redis, key: str) -> None:
        self._client = client
        self._key = key
        self._after: str | None = None

    def newest(self, count: int, is_wanted: Predicate) -> list[Entry]:
        """The newest `count` entries that are wanted and still there, oldest first."""
        found: list[Entry] = []
        before = self._place()
        while len(found) < count:
            reply: Any = self._client.xrevrange(self._key, max=before, count=PAGE)
            found += [entry for entry in map(_entry, reply) if is_wanted(entry)]
            if len(reply) < PAGE:
                break
            before = f"({reply[-1][0].decode()}"
        return found[:count][::-1]

    def read(self, *, block_ms: int) -> list[Entry]:
        """What came since; an empty list if nothing did within `block_ms`."""
        reply: Any = self._client.xread({self._key: self._place()}, count=PAGE, block=block_ms)
        entries = list(_entries(reply))
        if entries:
            self._after = entries[-1].entry_id
        return entries

    def _place(self) -> str:
        if self._after is None:
            self._after = self._last_id()
        return self._after

    def _last_id(self) -> str:
        """Of the newest entry there ever was, though it has left the stream. `$` would mean another one at each read."""
        try:
            information: Any = self._client.xinfo_stream(self._key)
        except redis.ResponseError as error:
            if "no such key" not in str(error):
                raise
            return FIRST_ID
        last_id: bytes = information["last-generated-id"]
        return last_id.decode()


def _entries(reply: Any) -> Iterator[Entry]:
    """XREAD's answer, in either of redis-py's shapes for it."""
    streams = reply.values() if isinstance(reply, dict) else [entries for _, entries in reply or ()]
    for entries in streams:
        yield from map(_entry, entries)


def _entry(item: tuple[bytes, dict[bytes, bytes]]) -> Entry:
    entry_id, fields = item
    try:
        return Entry(entry_id.decode(), trajectories.decode(fields[b"trajectory"]))
    except RecordError as error:
        return Entry(entry_id.decode(), error)
    except KeyError:
        return Entry(entry_id.decode(), RecordError("an entry of the stream must have the field `trajectory`, and this has none"))
