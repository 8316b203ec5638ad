"""The ledger against a model of itself: any interleaving of agents, crashes, updates and resumptions keeps the books."""

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator

import pytest
import redis
import redis.asyncio
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from shared.errors import LedgerError
from shared.keys import Keys
from shared.ledger import AdmissionLedger, DiscardReason, GroupRecord, Receipt, TrainingLedger
from tests.shared.episodes import finished_episode

GROUP_SIZE = 2
NUM_TOKENS = 2
"""Sampled in each finished episode."""
LONG_MS = 60_000
EXPIRED_MS = 0


@pytest.fixture
async def agents(redis_url: str, keys: Keys) -> AsyncIterator[AdmissionLedger]:
    async with redis.asyncio.Redis.from_url(redis_url) as client:
        ledger = AdmissionLedger(client, keys)
        await ledger.configure(async_generation_ratio=1.0, batch_groups=2)
        yield ledger


@pytest.fixture
def trainer(redis_client: redis.Redis, keys: Keys) -> TrainingLedger:
    ledger = TrainingLedger(redis_client, keys)
    ledger.create_consumer_group()
    return ledger


async def admit(ledger: AdmissionLedger, group_id: str, *, owner: str = "agent", lease_ms: int = LONG_MS) -> GroupRecord | None:
    return await ledger.admit(group_id=group_id, environment="calculator", group_size=GROUP_SIZE, owner=owner, lease_ms=lease_ms)


async def admit_and_finish(ledger: AdmissionLedger, group_id: str) -> GroupRecord:
    group = await admit(ledger, group_id)
    assert group is not None
    for sample_index in range(GROUP_SIZE):
        assert await ledger.finish(finished_episode(group, sample_index)) is Receipt.RECORDED
    return group


@pytest.mark.parametrize(("ratio", "batch_groups", "places"), [(0.0, 3, 3), (1.0, 3, 6), (0.5, 3, 4), (1.1, 10, 21), (0.1, 30, 33)])
async def test_admission_is_the_floor_of_v_plus_1_plus_ratio_times_batch(
    agents: AdmissionLedger, ratio: float, batch_groups: int, places: int
) -> None:
    await agents.configure(async_generation_ratio=ratio, batch_groups=batch_groups)
    admitted = [await admit(agents, f"g{i}") for i in range(places + 2)]
    assert [group is not None for group in admitted] == [True] * places + [False] * 2


async def test_a_ratio_set_while_the_run_goes_on_stays_until_a_run_file_says_another(
    agents: AdmissionLedger, trainer: TrainingLedger
) -> None:
    await agents.set_ratio(2.5)
    assert trainer.live_groups().async_generation_ratio == 2.5
    await agents.configure(async_generation_ratio=1.0, batch_groups=2)
    assert trainer.books().async_generation_ratio == 2.5, "another process started with the same run file"
    await agents.configure(async_generation_ratio=0.5, batch_groups=2)
    assert trainer.books().async_generation_ratio == 0.5


async def test_redundant_groups_are_admitted_while_no_whole_batch_is_ready(agents: AdmissionLedger) -> None:
    await agents.configure(async_generation_ratio=0.0, batch_groups=2, redundant_groups=1)
    await admit_and_finish(agents, "g0")
    assert [await admit(agents, f"h{i}") is not None for i in range(3)] == [True, True, False]
    await agents.configure(async_generation_ratio=0.0, batch_groups=1, redundant_groups=1)
    await agents.set_ratio(2.0)
    assert await admit(agents, "a batch is ready") is None


async def test_a_group_is_complete_with_the_episodes_it_needs(agents: AdmissionLedger, trainer: TrainingLedger) -> None:
    group = await agents.admit(group_id="g", environment="calculator", group_size=3, num_needed=2, owner="agent", lease_ms=LONG_MS)
    assert group is not None
    receipts = [await agents.finish(finished_episode(group, index)) for index in (2, 0, 1, 2)]
    assert receipts == [Receipt.RECORDED, Receipt.RECORDED, Receipt.SURPLUS, Receipt.DUPLICATE]
    books = trainer.books()
    assert (books.ready, books.episodes_surplus, books.stream_entries) == (1, 1, 2)
    assert [ready.num_episodes for ready in trainer.live_groups().ready] == [2]
    assert await agents.renew(owner="agent", lease_ms=LONG_MS, group_ids=["g"]) == ["g"], "its owner stops playing"


async def test_a_filtered_group_leaves_its_place_and_nothing_else(
    agents: AdmissionLedger, redis_client: redis.Redis, keys: Keys
) -> None:
    group = await admit(agents, "g")
    assert group is not None
    await agents.finish(finished_episode(group, 0), verdict="zero_variance")
    await agents.settle("g", num_needed=2, verdict="zero_variance")
    assert (await agents.books()).running == 1, "not complete yet"
    assert await agents.finish(finished_episode(group, 1), verdict="zero_variance") is Receipt.RECORDED
    books = await agents.books()
    assert (dict(books.discarded), books.filtered_in_a_row, books.episodes_discarded) == ({"filtered:zero_variance": 1}, 1, 2)
    assert books.is_balanced
    for key in (keys.running, keys.owners, keys.ready, keys.groups, keys.finished):
        assert not redis_client.exists(key)


async def test_recorded_episodes_of_a_group_can_be_read_again(
    agents: AdmissionLedger, redis_client: redis.Redis, keys: Keys
) -> None:
    group = await admit(agents, "g")
    assert group is not None
    await agents.finish(finished_episode(group, 1))
    assert [episode.sample_index for episode in await agents.finished(group, [0, 1])] == [1]
    entry = redis_client.xadd(keys.trajectories, {"trajectory": "not a record"})
    redis_client.hset(keys.finished, "g:0", entry)
    assert [episode.sample_index for episode in await agents.finished(group, [0, 1])] == [1]


async def test_an_update_opens_one_batch_of_places(agents: AdmissionLedger, trainer: TrainingLedger) -> None:
    groups = [await admit_and_finish(agents, f"g{i}") for i in range(4)]
    assert await admit(agents, "too many") is None
    trainer.publish(1, [group.group_id for group in groups[:2]])
    assert [await admit(agents, f"h{i}") is not None for i in range(3)] == [True, True, False]


async def test_a_finished_episode_is_recorded_once(agents: AdmissionLedger) -> None:
    group = await admit(agents, "g")
    assert group is not None
    receipts = [await agents.finish(finished_episode(group, 0)) for _ in range(3)]
    assert receipts == [Receipt.RECORDED, Receipt.DUPLICATE, Receipt.DUPLICATE]
    assert (await agents.books()).stream_entries == 1


async def test_an_episode_of_a_discarded_group_leaves_no_entry(agents: AdmissionLedger) -> None:
    group = await admit(agents, "g")
    assert group is not None
    await agents.finish(finished_episode(group, 0))
    assert await agents.discard(["g"], DiscardReason.ENVIRONMENT_GONE, requeue=False) == 1
    assert await agents.finish(finished_episode(group, 1)) is Receipt.GONE
    assert (await agents.books()).stream_entries == 0


async def test_tokens_that_nobody_trains_are_counted_by_reason(agents: AdmissionLedger, trainer: TrainingLedger) -> None:
    groups = [await admit_and_finish(agents, f"g{index}") for index in range(3)]
    each = finished_episode(groups[0], 0).num_sampled_tokens
    assert each == NUM_TOKENS
    assert (await agents.books()).discarded_tokens == {}
    trainer.discard(["g0"], DiscardReason.STALE, requeue=True)
    trainer.publish(1, ["g1", "g2"])
    assert await agents.finish(finished_episode(groups[0], 0)) is Receipt.GONE
    assert (await agents.books()).discarded_tokens == {"stale": GROUP_SIZE * each, "gone": each}
    filtered = await admit(agents, "g3")
    assert filtered is not None
    for sample_index in range(GROUP_SIZE):
        await agents.finish(finished_episode(filtered, sample_index), verdict="zero_variance")
    early = await admit(agents, "g4")
    assert early is not None
    assert await agents.finish(finished_episode(early, 0), num_needed=1) is Receipt.RECORDED
    assert await agents.finish(finished_episode(early, 1)) is Receipt.SURPLUS
    await agents.waste({"surplus": 7, "stale": 5})
    expected = {"stale": GROUP_SIZE * each + 5, "gone": each, "filtered:zero_variance": GROUP_SIZE * each, "surplus": each + 7}
    assert (await agents.books()).discarded_tokens == expected


async def test_a_dead_owner_s_group_is_adopted_with_what_it_had_finished(agents: AdmissionLedger) -> None:
    group = await admit(agents, "g", owner="dead", lease_ms=EXPIRED_MS)
    assert group is not None
    await agents.finish(finished_episode(group, 1))
    adopted = await agents.adopt(owner="alive", lease_ms=LONG_MS)
    assert adopted is not None
    record, finished = adopted
    assert (record.group_id, record.attempt, finished) == ("g", 1, [1])
    assert await agents.renew(owner="dead", lease_ms=LONG_MS, group_ids=["g"]) == ["g"]
    assert await agents.renew(owner="alive", lease_ms=LONG_MS, group_ids=["g"]) == []
    assert await agents.adopt(owner="third", lease_ms=LONG_MS) is None


async def test_a_group_that_starts_over_elsewhere_is_as_young_as_its_new_start(
    agents: AdmissionLedger, trainer: TrainingLedger
) -> None:
    for group_id in ("nothing left", "one left"):
        group = await admit(agents, group_id, owner="dead", lease_ms=EXPIRED_MS)
        assert group is not None
        await agents.sampling(group_id)
    await agents.finish(finished_episode(group, 0))
    adopted = [await agents.adopt(owner="alive", lease_ms=LONG_MS) for _ in range(2)]
    assert {group[0].group_id: group[0].sampling_version for group in adopted if group} == {"nothing left": None, "one left": 0}


async def test_processes_are_those_that_renew_and_the_episodes_they_have_to_finish(agents: AdmissionLedger) -> None:
    assert await agents.processes() == {}
    group = await admit(agents, "g", owner="busy")
    assert group is not None
    await admit(agents, "h", owner="busy")
    await admit(agents, "lost", owner="dead", lease_ms=EXPIRED_MS)
    await agents.renew(owner="idle", lease_ms=LONG_MS, group_ids=[])
    await agents.finish(finished_episode(group, 0))
    assert await agents.processes() == {"busy": 2 * GROUP_SIZE - 1, "idle": 0}
    await agents.renew(owner="idle", lease_ms=EXPIRED_MS, group_ids=[])
    assert list(await agents.processes()) == ["busy"]


async def test_a_requeued_task_runs_before_new_ones(agents: AdmissionLedger, trainer: TrainingLedger) -> None:
    await admit_and_finish(agents, "slow")
    await admit_and_finish(agents, "other")
    trainer.discard(["slow"], DiscardReason.STALE, requeue=True)
    again, new = await admit(agents, "again"), await admit(agents, "new")
    assert again is not None
    assert new is not None
    assert (again.task_index, again.attempt) == (0, 1)
    assert (new.task_index, new.attempt) == (2, 0)


async def test_what_was_trained_after_the_checkpoint_is_ready_again(agents: AdmissionLedger, trainer: TrainingLedger) -> None:
    for i in range(3):
        await admit_and_finish(agents, f"g{i}")
    trainer.publish(1, ["g0"])
    trainer.publish(2, ["g1"])
    assert trainer.restore(1) == 1
    books = trainer.books()
    assert (books.version, books.trained, books.unsaved, books.ready, books.stream_entries) == (1, 1, 0, 2, 2 * GROUP_SIZE)


async def test_what_a_checkpoint_taught_is_not_trained_again_when_redis_lost_its_publication(
    agents: AdmissionLedger, trainer: TrainingLedger
) -> None:
    await admit_and_finish(agents, "taught")
    await admit_and_finish(agents, "next")
    assert trainer.restore(1, ["taught", "unknown"]) == 0
    books = trainer.books()
    assert (books.version, books.trained, books.ready, books.stream_entries) == (1, 1, 1, GROUP_SIZE)
    assert books.is_balanced


async def test_a_redis_that_lost_everything_goes_on_at_the_checkpoint(agents: AdmissionLedger, trainer: TrainingLedger) -> None:
    assert trainer.restore(3, ["unknown"], trained=6, cursors={"calculator": 7}) == 0
    books = trainer.books()
    assert (books.version, books.started, books.trained) == (3, 6, 6)
    assert books.is_balanced
    again = await admit(agents, "next")
    assert again is not None
    assert again.task_index == 7, "tasks that were under way at the checkpoint are skipped, those before it not repeated"
    assert again.start_number == 7


async def test_a_redis_that_knows_more_than_the_checkpoint_keeps_it(agents: AdmissionLedger, trainer: TrainingLedger) -> None:
    for i in range(3):
        await admit_and_finish(agents, f"g{i}")
    assert trainer.cursors() == {"calculator": 3}
    trainer.publish(1, ["g0"])
    trainer.restore(1, ["g0"], trained=1, cursors={"calculator": 2})
    assert trainer.cursors() == {"calculator": 3}
    books = trainer.books()
    assert (books.started, books.trained, books.ready) == (3, 1, 2)


async def test_resuming_before_the_newest_checkpoint_is_refused_and_changes_nothing(
    agents: AdmissionLedger, trainer: TrainingLedger
) -> None:
    for i in range(2):
        await admit_and_finish(agents, f"g{i}")
    trainer.publish(1, ["g0"])
    trainer.acknowledge(1)
    before = trainer.books()
    with pytest.raises(LedgerError, match="the newest checkpoint is of version 1, got 0"):
        trainer.restore(0)
    assert trainer.books() == before
    assert trainer.restore(1) == 0


async def test_agents_give_up_only_groups_that_still_run(agents: AdmissionLedger) -> None:
    await admit_and_finish(agents, "ready")
    running = await admit(agents, "running")
    assert running is not None
    await agents.finish(finished_episode(running, 0))
    assert await agents.discard(["ready", "running"], DiscardReason.ENVIRONMENT_GONE, requeue=False) == 1
    books = await agents.books()
    assert (books.ready, books.running, books.episodes_discarded) == (1, 0, 1)


async def test_training_a_group_that_is_not_ready_is_refused(agents: AdmissionLedger, trainer: TrainingLedger) -> None:
    await admit(agents, "g")
    with pytest.raises(LedgerError, match="group g is not ready"):
        trainer.publish(1, ["g"])
    with pytest.raises(LedgerError, match="next version to publish is 1, got 3"):
        trainer.publish(3, [])
    assert trainer.books().version == 0


async def test_a_transition_repeated_because_its_reply_was_lost_changes_nothing(
    agents: AdmissionLedger, trainer: TrainingLedger
) -> None:
    assert await admit(agents, "g0") == await admit(agents, "g0")
    await admit_and_finish(agents, "g1")
    for _ in range(2):
        trainer.publish(1, ["g1"])
    books = trainer.books()
    assert (books.started, books.trained, books.version) == (2, 1, 1)
    assert books.is_balanced


async def test_a_group_that_left_the_ledger_leaves_no_key_behind(
    agents: AdmissionLedger, trainer: TrainingLedger, redis_client: redis.Redis, keys: Keys
) -> None:
    await admit_and_finish(agents, "g")
    trainer.publish(1, ["g"])
    trainer.acknowledge(1)
    for key in (keys.running, keys.owners, keys.ready, keys.unsaved, keys.groups, keys.finished):
        assert not redis_client.exists(key)
    assert redis_client.xlen(keys.trajectories) == 0


class LedgerMachine(RuleBasedStateMachine):
    """Two agents, one of which may die at any point, and a trainer that may be killed between any two of its calls."""

    redis_url = ""
    runs = 0

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.Runner()
        LedgerMachine.runs += 1
        self.keys = Keys(f"machine-{LedgerMachine.runs}")
        self.sync_client = redis.Redis.from_url(self.redis_url)
        self.async_client = redis.asyncio.Redis.from_url(self.redis_url)
        self.agents = AdmissionLedger(self.async_client, self.keys)
        self.trainer = TrainingLedger(self.sync_client, self.keys)
        self.trainer.create_consumer_group()
        self.missing: dict[str, set[int]] = {}
        self.entries: dict[str, int] = {}
        """Episodes in the stream of groups that are ready or trained."""
        self.records: dict[str, GroupRecord] = {}
        self.ready: list[str] = []
        self.trained_at: dict[str, int] = {}
        self.saved_version = 0
        self.version = 0
        self.saved: set[str] = set()
        self.synchronous_until = 0
        self.is_held = False
        self.discarded = 0
        self.wasted_episodes: Counter[str] = Counter()
        """By reason: finished, and never to be trained."""

    @initialize(ratio=st.sampled_from([0.0, 0.5, 1.0, 2.5]), batch_groups=st.integers(1, 3), redundant=st.integers(0, 2))
    def configure(self, ratio: float, batch_groups: int, redundant: int) -> None:
        self.ratio, self.batch_groups, self.redundant = ratio, batch_groups, redundant
        settings = {"async_generation_ratio": ratio, "batch_groups": batch_groups, "redundant_groups": redundant}
        self.loop.run(self.agents.configure(**settings))

    @rule(ratio=st.sampled_from([0.0, 0.5, 1.0, 2.5]))
    def change_ratio(self, ratio: float) -> None:
        self.ratio = ratio
        self.loop.run(self.agents.set_ratio(ratio))

    @rule(num_updates=st.integers(0, 2))
    def fall_back(self, num_updates: int) -> None:
        self.synchronous_until = self.version + num_updates
        self.trainer.make_synchronous(self.synchronous_until)

    @rule(is_held=st.sampled_from([False, False, True]))
    def hold(self, is_held: bool) -> None:
        self.is_held = is_held
        self.loop.run(self.agents.hold("evaluation", lease_ms=LONG_MS if is_held else 0))

    @rule(lease_ms=st.sampled_from([EXPIRED_MS, LONG_MS]))
    def admit(self, lease_ms: int) -> None:
        self._admit(lease_ms)

    @rule(num_groups=st.integers(1, 4))
    def play(self, num_groups: int) -> None:
        """Groups that nothing happens to: without them few interleavings get as far as an update."""
        for _ in range(num_groups):
            if (group_id := self._admit(LONG_MS)) is not None:
                for index in range(GROUP_SIZE):
                    self._finish(group_id, index, num_needed=None, verdict="")

    def _admit(self, lease_ms: int) -> str | None:
        """The admitted group's id, exactly if there was a place."""
        group_id = f"g{len(self.records)}"
        group = self.loop.run(admit(self.agents, group_id, lease_ms=lease_ms))
        ratio = 0.0 if self.version < self.synchronous_until else self.ratio
        places = math.floor((self.version + 1 + ratio) * self.batch_groups)
        places += self.redundant if len(self.ready) < self.batch_groups else 0
        alive = len(self.missing) + len(self.ready) + len(self.trained_at) + len(self.saved)
        assert (group is not None) == (alive < places and not self.is_held)
        if group is not None:
            self.records[group_id], self.missing[group_id] = group, set(range(GROUP_SIZE))
        return None if group is None else group_id

    @precondition(lambda self: self.missing)
    @rule(data=st.data(), index=st.integers(0, GROUP_SIZE - 1), verdict=st.sampled_from(["", "", "zero_variance"]))
    def finish(self, data: st.DataObject, index: int, verdict: str) -> None:
        group_id = data.draw(st.sampled_from(sorted(self.missing)))
        self._finish(group_id, index, num_needed=data.draw(st.sampled_from([None, 1])), verdict=verdict)

    def _finish(self, group_id: str, index: int, *, num_needed: int | None, verdict: str) -> None:
        episode = finished_episode(self.records[group_id], index)
        receipt = self.loop.run(self.agents.finish(episode, num_needed=num_needed, verdict=verdict))
        assert receipt is (Receipt.RECORDED if index in self.missing[group_id] else Receipt.DUPLICATE)
        if receipt is Receipt.RECORDED:
            self.missing[group_id].discard(index)
            if not self.missing[group_id] or num_needed == 1:
                self._complete(group_id, verdict)

    @precondition(lambda self: self.missing)
    @rule(data=st.data(), num_needed=st.integers(1, GROUP_SIZE), verdict=st.sampled_from(["", "zero_variance"]))
    def settle(self, data: st.DataObject, num_needed: int, verdict: str) -> None:
        """A group passes its deadline."""
        group_id = data.draw(st.sampled_from(sorted(self.missing)))
        self.loop.run(self.agents.settle(group_id, num_needed=num_needed, verdict=verdict))
        if GROUP_SIZE - len(self.missing[group_id]) >= num_needed:
            self._complete(group_id, verdict)

    @precondition(lambda self: self.ready)
    @rule(data=st.data(), index=st.integers(0, GROUP_SIZE - 1))
    def finish_too_late(self, data: st.DataObject, index: int) -> None:
        group_id = data.draw(st.sampled_from(self.ready))
        receipt = self.loop.run(self.agents.finish(finished_episode(self.records[group_id], index)))
        assert receipt in (Receipt.SURPLUS, Receipt.DUPLICATE)
        self.wasted_episodes["surplus"] += receipt is Receipt.SURPLUS

    def _complete(self, group_id: str, verdict: str) -> None:
        num_episodes = GROUP_SIZE - len(self.missing.pop(group_id))
        if verdict:
            self.discarded += 1
            self.wasted_episodes[f"filtered:{verdict}"] += num_episodes
        else:
            self.entries[group_id] = num_episodes
            self.ready.append(group_id)

    @precondition(lambda self: self.missing)
    @rule(data=st.data())
    def sample(self, data: st.DataObject) -> None:
        self.loop.run(self.agents.sampling(data.draw(st.sampled_from(sorted(self.missing)))))

    @precondition(lambda self: self.missing)
    @rule()
    def adopt(self) -> None:
        adopted = self.loop.run(self.agents.adopt(owner="survivor", lease_ms=EXPIRED_MS))
        if adopted is not None:
            record, finished = adopted
            assert set(range(GROUP_SIZE)) - set(finished) == self.missing[record.group_id]

    @precondition(lambda self: self.ready)
    @rule(data=st.data())
    def train(self, data: st.DataObject) -> None:
        batch = data.draw(st.lists(st.sampled_from(self.ready), min_size=1, max_size=self.batch_groups, unique=True))
        self.version += 1
        self.trainer.publish(self.version, batch)
        self.ready = [group_id for group_id in self.ready if group_id not in batch]
        self.trained_at |= dict.fromkeys(batch, self.version)

    @precondition(lambda self: self.trained_at)
    @rule(is_acknowledged=st.booleans())
    def save_checkpoint(self, is_acknowledged: bool) -> None:
        """The trainer may be killed between the checkpoint and its acknowledgement."""
        self.saved_version = self.version
        if is_acknowledged:
            self.trainer.acknowledge(self.version)
            self._settle()

    @precondition(lambda self: self.version)
    @rule()
    def crash_and_resume(self) -> None:
        lost = [group_id for group_id, version in self.trained_at.items() if version > self.saved_version]
        assert self.trainer.restore(self.saved_version) == len(lost)
        self.version = self.saved_version
        self.ready += lost
        self._settle()

    @precondition(lambda self: self.missing or self.ready)
    @rule(data=st.data(), requeue=st.booleans())
    def discard(self, data: st.DataObject, requeue: bool) -> None:
        group_id = data.draw(st.sampled_from(sorted(self.missing) + self.ready))
        assert self.trainer.discard([group_id, "unknown"], DiscardReason.STALE, requeue=requeue) == 1
        missing = self.missing.pop(group_id, None)
        self.wasted_episodes["stale"] += self.entries[group_id] if missing is None else GROUP_SIZE - len(missing)
        self.ready = [other for other in self.ready if other != group_id]
        self.discarded += 1

    def _settle(self) -> None:
        """After an acknowledgement, or a resumption that repeats it, nothing trained is unsaved."""
        self.saved |= {group_id for group_id, version in self.trained_at.items() if version <= self.saved_version}
        self.trained_at = {}

    @invariant()
    def books_balance(self) -> None:
        books = self.trainer.books()
        assert books.is_balanced
        assert (books.version, books.started, books.running, books.ready) == (
            self.version,
            len(self.records),
            len(self.missing),
            len(self.ready),
        )
        assert (books.trained, books.unsaved) == (len(self.trained_at) + len(self.saved), len(self.trained_at))
        assert sum(books.discarded.values()) == self.discarded
        assert books.discarded_tokens == {reason: NUM_TOKENS * count for reason, count in self.wasted_episodes.items() if count}

    @invariant()
    def trainer_sees_what_is_live(self) -> None:
        live = self.trainer.live_groups()
        assert [group.record.group_id for group in live.ready] == sorted(self.ready, key=lambda id_: self.records[id_].start_number)
        assert {record.group_id for record in live.running} == set(self.missing)

    @invariant()
    def every_finished_episode_that_is_not_durable_is_in_the_stream(self) -> None:
        running = sum(GROUP_SIZE - len(missing) for missing in self.missing.values())
        expected = running + sum(self.entries[group_id] for group_id in [*self.ready, *self.trained_at])
        assert self.trainer.books().stream_entries == expected

    def teardown(self) -> None:
        for key in self.sync_client.scan_iter(f"*{{{self.keys.run_id}}}*"):
            self.sync_client.delete(key)
        self.loop.run(self.async_client.aclose())
        self.loop.close()
        self.sync_client.close()


def test_the_books_balance_under_any_interleaving(redis_url: str) -> None:
    machine = type("Machine", (LedgerMachine,), {"redis_url": redis_url})
    run_state_machine_as_test(
        machine,
        settings=settings(max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]),
    )
