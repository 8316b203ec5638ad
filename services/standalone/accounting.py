"""Whether a run lost an episode, from sources that do not know of each other.

    finished     episodes whose record entered the stream: a counter of the ledger
    recorded     episodes that the agents were told are recorded: the agents' own counter
    in_stream    entries that XRANGE finds: of groups that run, are ready, or were trained and wait for a checkpoint
    trained      trajectory ids in lineage.jsonl whose entries have left the stream
    failed       episodes without a usable reward in those trained groups: the agents' own count by outcome bounds it
    discarded    episodes that had finished when their group was given up: a counter of the ledger

An episode is lost when it finished and is in none of the others, or when the agents know of it and the ledger does not:

    lost = max(0, recorded - finished) + finished - in_stream - trained - failed - discarded

The trainer must have ended. Episodes may still finish meanwhile, so the ledger is read again until it stood still.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

import httpx
import redis.asyncio
from prometheus_client.parser import text_string_to_metric_families

from services.standalone.run_files import Lineage, lineage
from shared import redis_address
from shared import trajectory as trajectories
from shared.configuration import Configuration
from shared.keys import Keys
from shared.ledger import AdmissionLedger, Books
from shared.trajectory import Outcome

TIMEOUT_S: Final = 10.0
STANDSTILL_TIMEOUT_S: Final = 60.0
STANDSTILL_POLL_S: Final = 0.2


@dataclass(frozen=True)
class AgentCounts:
    """What the agent process itself counted: records it was told are kept, and those of them without a usable reward."""

    recorded: int
    without_reward: int


@dataclass(frozen=True)
class StreamEntry:
    group_id: str
    trajectory_id: str


@dataclass(frozen=True)
class Account:
    """Episodes by where they are at the end of a run."""

    finished: int
    recorded: int
    in_stream: int
    trained: int
    failed: int
    discarded: int

    @property
    def lost(self) -> int:
        unknown_to_ledger = max(0, self.recorded - self.finished)
        return unknown_to_ledger + self.finished - self.in_stream - self.trained - self.failed - self.discarded


def account(
    books: Books, entries: Iterable[StreamEntry], lines: Iterable[Lineage], agents: AgentCounts, *, group_size: int
) -> Account:
    """The account of a run whose sources stood still."""
    entries, lines = list(entries), list(lines)
    ids_in_stream = {entry.trajectory_id for entry in entries}
    groups_in_stream = {entry.group_id for entry in entries}
    trained = {id_ for line in lines for id_ in line.trajectory_ids} - ids_in_stream
    left_groups = {id_ for line in lines for id_ in line.group_ids} - groups_in_stream
    return Account(
        finished=books.episodes_finished,
        recorded=agents.recorded,
        in_stream=len(ids_in_stream),
        trained=len(trained),
        failed=min(group_size * len(left_groups) - len(trained), agents.without_reward),
        discarded=books.episodes_discarded,
    )


async def take_account(configuration: Configuration) -> Account:
    """Asks every source of a run whose trainer has ended while Redis and the agents still run."""
    async with httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False) as agents:
        exposition = (await agents.get(f"{configuration.env_agents.address}/metrics")).raise_for_status().text
    url = redis_address.connection_url(configuration.redis.url)
    async with redis.asyncio.Redis.from_url(url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S) as client:
        books, entries = await _at_standstill(client, Keys(configuration.run.id))
    lines = lineage(Path(configuration.run.directory))
    group_size = configuration.rollout.num_return_sequences_in_group
    return account(books, entries, lines, agent_counts(exposition), group_size=group_size)


def agent_counts(exposition: str) -> AgentCounts:
    """The counts in an agent process's /metrics."""
    recorded = without_reward = 0
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            if sample.name == "headrace_agents_episodes_total" and sample.labels["receipt"] == "recorded":
                recorded += int(sample.value)
                without_reward += 0 if Outcome(sample.labels["outcome"]).is_trainable else int(sample.value)
    return AgentCounts(recorded, without_reward)


async def _at_standstill(client: redis.asyncio.Redis, keys: Keys) -> tuple[Books, list[StreamEntry]]:
    """Books and stream between which nothing changed. Raises: TimeoutError if they never stand still."""
    ledger = AdmissionLedger(client, keys)
    async with asyncio.timeout(STANDSTILL_TIMEOUT_S):
        while True:
            before = await ledger.books()
            reply = cast(list[tuple[bytes, dict[bytes, bytes]]], await client.xrange(keys.trajectories))
            if await ledger.books() == before:
                return before, [_entry(fields) for _, fields in reply]
            await asyncio.sleep(STANDSTILL_POLL_S)


def _entry(fields: dict[bytes, bytes]) -> StreamEntry:
    return StreamEntry(fields[b"group_id"].decode(), trajectories.decode(fields[b"trajectory"]).trajectory_id)
