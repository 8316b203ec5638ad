"""The ledger: which groups run, which are ready, which were trained, and how many more may start.

A group is WAITING → RUNNING → READY → TRAINED, or DISCARDED from RUNNING or READY.

    WAITING   a place is free                                              agents:  admit()
    RUNNING   episodes in flight under a lease; an expired lease lets      agents:  renew(), adopt()
              another agent process run the episodes that are missing
    READY     the episodes it needs are in the stream                      agents:  finish() of the last one, settle()
    TRAINED   the policy learnt from it; unsaved until a checkpoint        trainer: publish(), acknowledge()
              holds what it taught, and READY again if that is lost        trainer: restore()
    DISCARDED counted by reason, its task run again first if wanted        either:  discard()

Invariant, at every instant:  started = running + ready + trained + discarded.
Admission, with v updates published, B groups an update and α = async_generation_ratio:

    started - discarded <= floor((v + 1 + α) · B)        and redundant groups beyond that while fewer than B are ready

The n-th group that counts is trained at version ceil(n / B) - 1 at the latest once its turn has come, so a group admitted at v
has a lag of at most ceil(α): a fractional α sets which share of the groups reaches it (versions.max_lag).

Each transition is one Lua script (shared/lua/), hence atomic for any number of agent processes and indivisible when one is
killed: an episode's record enters the stream in the same step as it enters the books.
"""

import contextlib
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib.resources import files
from types import MappingProxyType
from typing import Any, cast

import msgspec
import redis
import redis.asyncio

from shared import pipeline as pipelines
from shared import trajectory as trajectories
from shared.errors import LedgerError, RecordError
from shared.keys import CONSUMER_GROUP, MAX_DEAD_LETTERS, Keys
from shared.pipeline import PipelineReport
from shared.trajectory import Trajectory


class DiscardReason(StrEnum):
    """Why a group was not trained."""

    STALE = "stale"
    """Older than the asynchronous ratio allows when its turn came."""
    FAILED = "failed"
    """Too few of its episodes have a reward to learn from."""
    UNREADABLE = "unreadable"
    """A record of it could not be decoded; it lies in the dead-letter stream."""
    NON_FINITE = "non_finite"
    """The update on it had a loss or gradient that is no finite number, and was skipped."""
    ENVIRONMENT_GONE = "environment_gone"
    """Its environment was deleted while it ran or waited to run again."""


FILTERED = "filtered:"
"""Prefix of the reason of a group that a filter of the run discarded."""


class Receipt(StrEnum):
    """What became of a finished episode."""

    RECORDED = "recorded"
    DUPLICATE = "duplicate"
    """Another attempt of the same episode was recorded first."""
    GONE = "gone"
    """Its group had been discarded."""
    SURPLUS = "surplus"
    """Its group was complete without it."""


class GroupRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What it takes to run a group: episodes of one task. `start_number` orders consumption, oldest first."""

    group_id: str
    group_size: int
    """Episodes started."""
    num_needed: int
    """G, finished episodes that complete it."""
    environment: str
    task_index: int
    attempt: int
    admitted_version: int
    start_number: int
    sampling_version: int | None = None
    """Version in force when its first episode began to sample, so that no token is older; None before."""


@dataclass(frozen=True)
class ReadyGroup:
    record: GroupRecord
    num_episodes: int
    """Those in the stream."""


@dataclass(frozen=True)
class LiveGroups:
    """Groups that may still be trained, and how old they may be, at one instant."""

    async_generation_ratio: float
    ready: tuple[ReadyGroup, ...]
    """Oldest start first."""
    running: tuple[GroupRecord, ...]

    @property
    def ids(self) -> set[str]:
        return {group.record.group_id for group in self.ready} | {record.group_id for record in self.running}


@dataclass(frozen=True)
class Ending:
    """A group that ran has ended before all of its episodes did: what its owner still plays of it is for nothing."""

    reason: str
    group_id: str


@dataclass(frozen=True)
class Books:
    """The ledger's counts, in groups, at one instant."""

    version: int
    async_generation_ratio: float
    batch_groups: int
    started: int
    running: int
    ready: int
    trained: int
    unsaved: int
    discarded: Mapping[str, int]
    """By DiscardReason, or `filtered:` and the filter's name."""
    discarded_tokens: Mapping[str, int]
    """Tokens that the policy sampled and nobody trains, by reason: a group's; `surplus`, its group was complete without them;
    `gone` and `lost`, their group had ended or another process plays it. What a cancelled call was sampling is not known."""
    requeued: int
    episodes_finished: int
    """Episodes whose record ever entered the stream."""
    episodes_discarded: int
    """Those of them whose group was discarded."""
    episodes_surplus: int
    """Episodes that had not finished when their group was complete without them."""
    filtered_in_a_row: int
    """Groups that filters discarded since one was kept."""
    redundant_groups: int
    synchronous_until: int
    """Version before which admission behaves as if α were 0."""
    holds: int
    """Evaluations that no new group may start beside."""
    dead_letters: int
    """Records that nobody could read."""
    stream_entries: int

    @property
    def ratio_in_force(self) -> float:
        """α of admission: 0 while the run has fallen back to synchronous."""
        return 0.0 if self.version < self.synchronous_until else self.async_generation_ratio

    @property
    def is_balanced(self) -> bool:
        return self.started == self.running + self.ready + self.trained + sum(self.discarded.values())


_SCRIPT_NAMES = (
    "configure",
    "admit",
    "renew",
    "adopt",
    "sampling",
    "finish",
    "settle",
    "discard",
    "live",
    "publish",
    "acknowledge",
    "restore",
    "hold",
    "bury",
    "books",
    "processes",
)
_LISTEN_S = 5.0
_record_decoder = msgspec.json.Decoder(GroupRecord)


def _sources() -> dict[str, str]:
    folder = files("shared") / "lua"
    prelude = (folder / "prelude.lua").read_text()
    return {name: prelude + (folder / f"{name}.lua").read_text() for name in _SCRIPT_NAMES}


def _script_keys(keys: Keys) -> list[str]:
    """KEYS of every script, in the order of prelude.lua."""
    return [
        keys.ledger,
        keys.running,
        keys.owners,
        keys.ready,
        keys.unsaved,
        keys.groups,
        keys.finished,
        keys.requeued,
        keys.cursors,
        keys.trajectories,
        keys.processes,
        keys.endings,
        keys.holds,
        keys.dead_letters,
    ]


def _parse_books(reply: Sequence[Any]) -> Books:
    pairs, running, ready, unsaved, requeued, stream_entries, holds = reply
    fields = {pairs[i].decode(): pairs[i + 1].decode() for i in range(0, len(pairs), 2)}

    def by_reason(prefix: str) -> dict[str, int]:
        return {name.removeprefix(prefix): int(count) for name, count in fields.items() if name.startswith(prefix)}

    return Books(
        version=int(fields.get("version", 0)),
        async_generation_ratio=float(fields.get("ratio", 0)),
        batch_groups=int(fields.get("batch_groups", 0)),
        started=int(fields.get("started", 0)),
        running=running,
        ready=ready,
        trained=int(fields.get("trained", 0)),
        unsaved=unsaved,
        discarded=by_reason("discarded:"),
        discarded_tokens={reason: count for reason, count in by_reason("discarded_tokens:").items() if count},
        requeued=requeued,
        episodes_finished=int(fields.get("episodes_finished", 0)),
        episodes_discarded=int(fields.get("episodes_discarded", 0)),
        episodes_surplus=int(fields.get("episodes_surplus", 0)),
        filtered_in_a_row=int(fields.get("filtered_in_a_row", 0)),
        redundant_groups=int(fields.get("redundant_groups", 0)),
        synchronous_until=int(fields.get("synchronous_until", 0)),
        holds=holds,
        dead_letters=int(fields.get("dead_letters", 0)),
        stream_entries=stream_entries,
    )


class AdmissionLedger:
    """The agents' side: places, leases and finished episodes. Redis errors pass through; the caller decides on retries."""

    def __init__(self, client: redis.asyncio.Redis, keys: Keys) -> None:
        self._client = client
        self._keys = keys
        self._script_keys = _script_keys(keys)
        self._scripts = {name: client.register_script(source) for name, source in _sources().items()}

    async def _run(self, name: str, *arguments: str | int | bytes) -> Any:
        return await self._scripts[name](keys=self._script_keys, args=list(arguments))

    async def configure(self, *, async_generation_ratio: float, batch_groups: int, redundant_groups: int = 0) -> None:
        """Sets α, B and redundant groups of the run file; an α of `set_ratio` stays until a run file with another one comes."""
        await self._run("configure", repr(async_generation_ratio), batch_groups, redundant_groups)

    async def set_ratio(self, async_generation_ratio: float) -> None:
        """Sets α of a run that goes on: for admission and for the trainer's staleness decision at once."""
        await self._client.hset(self._keys.ledger, "ratio", repr(async_generation_ratio))

    async def admit(
        self, *, group_id: str, environment: str, group_size: int, owner: str, lease_ms: int, num_needed: int | None = None
    ) -> GroupRecord | None:
        """A place for a group of `environment`, or None while the asynchronous ratio allows no more.

        Tasks that wait to run again come first, so the record may name another environment than the one asked for.

        Args: group_size: episodes to start. num_needed: those that complete it, None for all.
        """
        record = await self._run("admit", group_id, environment, group_size, num_needed or group_size, owner, lease_ms)
        return None if record is None else _record_decoder.decode(record)

    async def hold(self, hold_id: str, *, lease_ms: int) -> None:
        """Lets no process admit a new group for `lease_ms` from now, unless renewed or ended by a lease of 0."""
        await self._run("hold", hold_id, lease_ms)

    async def renew(self, *, owner: str, lease_ms: int, group_ids: Iterable[str]) -> list[str]:
        """Says that this process lives and extends the leases of running groups, for `lease_ms` from now.

        Returns the groups that are no longer this owner's to run.
        """
        lost = await self._run("renew", owner, lease_ms, *group_ids)
        return [group_id.decode() for group_id in lost]

    async def adopt(self, *, owner: str, lease_ms: int) -> tuple[GroupRecord, list[int]] | None:
        """A group whose owner stopped renewing, and the sample indexes that need no second run; None if there is none."""
        adopted = await self._run("adopt", owner, lease_ms)
        return None if adopted is None else (_record_decoder.decode(adopted[0]), adopted[1])

    async def sampling(self, group_id: str) -> None:
        """Notes that the first episode of a running group is about to sample; later calls change nothing."""
        await self._run("sampling", group_id)

    async def endings(self) -> AsyncGenerator[Ending | None, None]:
        """Groups that end while they run, within a round trip of their end; for as long as the connection holds.

        None whenever listening begins, also after a connection that was lost and made again: a message that came before is lost,
        and `renew` tells the same.
        """
        async with self._client.pubsub() as pubsub:
            await pubsub.subscribe(self._keys.endings)
            while True:
                message = await pubsub.get_message(timeout=_LISTEN_S)
                if message is None:
                    continue
                if message["type"] == "message":
                    reason, _, group_id = message["data"].decode().partition(" ")
                    yield Ending(reason, group_id)
                else:
                    yield None

    async def finish(self, trajectory: Trajectory, *, num_needed: int | None = None, verdict: str = "") -> Receipt:
        """Records one finished episode, once, however often it is called for the same group and sample index.

        Args: num_needed: finished episodes that complete the group, None for the number it was admitted with. verdict: name of
        the filter that discards the group if this episode completes it, or "".
        """
        record = trajectories.encode(trajectory)
        needed = "" if num_needed is None else num_needed
        num_tokens = trajectory.num_sampled_tokens
        reply = await self._run("finish", trajectory.group_id, trajectory.sample_index, record, needed, verdict, num_tokens)
        return Receipt(reply.decode())

    async def settle(self, group_id: str, *, num_needed: int, verdict: str) -> None:
        """Completes a running group with the episodes that have finished, if they are enough; see `finish`."""
        await self._run("settle", group_id, num_needed, verdict)

    async def finished(self, record: GroupRecord, sample_indexes: Iterable[int]) -> list[Trajectory]:
        """The recorded episodes of a running group, those that can be read."""
        fields = [f"{record.group_id}:{index}" for index in sample_indexes]
        entry_ids = await self._client.hmget(self._keys.finished, fields) if fields else []
        async with self._client.pipeline(transaction=False) as pipeline:
            for entry_id in entry_ids:
                if entry_id is not None:
                    pipeline.xrange(self._keys.trajectories, entry_id, entry_id)
            pages = await pipeline.execute()
        found = []
        for _, entry in (entry for page in pages for entry in page):
            with contextlib.suppress(RecordError):  # The trainer buries it with its group.
                found.append(trajectories.decode(entry[b"trajectory"]))
        return found

    async def discard(self, group_ids: Iterable[str], reason: DiscardReason, *, requeue: bool) -> int:
        """Gives up groups that still run; returns how many did. A ready group is the trainer's to decide on."""
        return cast(int, await self._run("discard", reason, int(requeue), 1, *group_ids))

    async def waste(self, tokens_by_reason: Mapping[str, int]) -> None:
        """Counts tokens of episodes that were cancelled. A statistic: a call whose answer is lost may count twice."""
        async with self._client.pipeline(transaction=False) as pipeline:
            for reason, count in tokens_by_reason.items():
                pipeline.hincrby(self._keys.ledger, f"discarded_tokens:{reason}", count)
            await pipeline.execute()

    async def processes(self) -> dict[str, int]:
        """The agent processes that live, by owner, and the episodes that each of them has to finish."""
        reply = await self._run("processes")
        return dict(sorted((reply[i].decode(), reply[i + 1]) for i in range(0, len(reply), 2)))

    async def pipeline(self) -> PipelineReport | None:
        """The trainer's newest report; None before its first."""
        record = cast(bytes | None, await self._client.get(self._keys.pipeline))
        return None if record is None else pipelines.decode(record)

    async def books(self) -> Books:
        return _parse_books(await self._run("books"))


class TrainingLedger:
    """The trainer's side: what was trained, what is durable, what was discarded."""

    def __init__(self, client: redis.Redis, keys: Keys) -> None:
        self._client = client
        self._keys = keys
        self._script_keys = _script_keys(keys)
        self._scripts = {name: client.register_script(source) for name, source in _sources().items()}

    def _run(self, name: str, *arguments: str | int) -> Any:
        """Raises: LedgerError if the script refuses."""
        try:
            return self._scripts[name](keys=self._script_keys, args=list(arguments))
        except redis.ResponseError as error:
            if str(error).startswith("LEDGER"):
                raise LedgerError(str(error).removeprefix("LEDGER ")) from error
            raise

    def create_consumer_group(self) -> None:
        """Makes the stream and its consumer group unless they exist."""
        try:
            self._client.xgroup_create(self._keys.trajectories, CONSUMER_GROUP, id="0", mkstream=True)
        except redis.ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise

    def publish(self, version: int, group_ids: Iterable[str]) -> None:
        """The weights trained on `group_ids` are in force as `version`, the next one.

        Raises: LedgerError if a group is not ready or the version is not the next.
        """
        self._run("publish", version, *group_ids)

    def make_synchronous(self, until: int) -> None:
        """Admission behaves as if α were 0 until version `until`. What is in flight is trained within the bound of α as ever."""
        self._client.hset(self._keys.ledger, "synchronous_until", until)

    def bury(self, entry_id: str, reason: str) -> None:
        """Moves a record that cannot be read to the dead letters, and discards its group unless that was trained."""
        self._run("bury", entry_id, reason, MAX_DEAD_LETTERS)

    def live_groups(self) -> LiveGroups:
        ratio, ready, running = self._run("live")
        return LiveGroups(
            float(ratio),
            tuple(ReadyGroup(_record_decoder.decode(ready[i]), ready[i + 1]) for i in range(0, len(ready), 2)),
            tuple(map(_record_decoder.decode, running)),
        )

    def acknowledge(self, version: int) -> int:
        """Everything trained up to `version` is in a durable checkpoint and may leave the stream.

        Raises: LedgerError if a later checkpoint was durable already.
        """
        return cast(int, self._run("acknowledge", version))

    def restore(
        self,
        version: int,
        saved_group_ids: Iterable[str] = (),
        *,
        trained: int = 0,
        cursors: Mapping[str, int] = MappingProxyType({}),
    ) -> int:
        """Continues the books at the checkpoint of `version`; returns how many groups are ready again.

        Args: saved_group_ids: what the checkpoint taught. A Redis that lost its last second may still hold them for ready.
        trained, cursors: groups of the whole lineage and next tasks, with which a Redis that lost everything goes on.
        Raises: LedgerError if a later checkpoint was durable: what it taught has left the stream.
        """
        self.acknowledge(version)
        encoded = msgspec.json.encode(dict(cursors)).decode()
        return cast(int, self._run("restore", version, trained, encoded, *saved_group_ids))

    def cursors(self) -> dict[str, int]:
        """The index of each environment's next task."""
        cursors = cast(dict[bytes, bytes], self._client.hgetall(self._keys.cursors))
        return {name.decode(): int(index) for name, index in cursors.items()}

    def discard(self, group_ids: Iterable[str], reason: DiscardReason, *, requeue: bool) -> int:
        """Gives up groups that run or are ready; returns how many were."""
        return cast(int, self._run("discard", reason, int(requeue), 0, *group_ids))

    def report_pipeline(self, report: PipelineReport) -> None:
        """Puts the newest report where every process of the run finds it."""
        self._client.set(self._keys.pipeline, pipelines.encode(report))

    def books(self) -> Books:
        return _parse_books(self._run("books"))
