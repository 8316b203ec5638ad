"""Nothing lost, nothing trained twice: every state of the small model, and the same steps on the real ledger."""

import random
import sys
from collections.abc import AsyncIterator

import pytest
import redis
import redis.asyncio

from shared.errors import LedgerError
from shared.keys import Keys
from shared.ledger import AdmissionLedger, DiscardReason, GroupRecord, TrainingLedger
from shared.stream import TrajectoryConsumer
from tests.protocol import books_model as model
from tests.protocol.books_model import Bug, Limits, State
from tests.protocol.search import Exploration, Step, explore
from tests.shared.episodes import finished_episode

FEW = Limits(agent_crashes=1, trainer_crashes=1, lost_replies=0, expired_leases=1, discards=0)
LONG_MS = 60_000
NUM_WALKS, WALK_STEPS = 24, 45


def search(limits: Limits, bugs: Bug = Bug.NONE) -> Exploration[State]:
    """Counterexamples are looked for without renaming, so that they can be read."""
    canonical = {} if bugs else {"canonical": model.canonical}
    return explore(model.initial(limits), lambda state: model.steps(state, bugs), model.broken_rule, model.is_end, **canonical)


@pytest.mark.parametrize(
    ("limits", "num_states"),
    [
        (FEW._replace(lost_replies=1), 40_357),
        (FEW._replace(trainer_crashes=2, discards=1), 17_102),
        (FEW._replace(agent_crashes=0, expired_leases=0, lost_writes=1), 4_429),
        (FEW._replace(agents=1, expired_leases=0, lost_writes=1), 5_748),
    ],
    ids=["a reply is lost", "the trainer dies twice", "Redis loses a write", "Redis loses a write and the agent dies"],
)
def test_every_rule_holds_in_every_state_and_each_has_a_way_to_the_end(limits: Limits, num_states: int) -> None:
    found = search(limits)
    assert found.problem is None, str(found)
    assert found.num_states == num_states, "fewer would mean that something cannot happen any more"


@pytest.mark.parametrize(
    ("bug", "limits", "rule", "last_steps"),
    [
        (
            Bug.ACKNOWLEDGED_TOO_EARLY,
            FEW,
            "no finished episode is lost",
            ["trainer publish 1 0", "trainer save 1", "trainer acknowledge 1"],
        ),
        (
            Bug.LEASE_TOO_SHORT,
            FEW._replace(agent_crashes=0),
            "an episode counts once",
            ["lease of 0 runs out", "agent 1 adopt 0", "agent 0 finish 0.0 recorded", "agent 1 finish 0.0 recorded"],
        ),
        (
            Bug.VERSION_COUNTED_TWICE,
            FEW._replace(lost_replies=1),
            "the books balance",
            ["trainer publish 1 0 and the reply is lost", "trainer publish 1 0"],
        ),
        (Bug.UNSAVED_FORGOTTEN, FEW, "what the books call trained", ["trainer publish 1 0", "trainer dies", "trainer restore 0"]),
    ],
    ids=lambda value: value.name if isinstance(value, Bug) else "",
)
def test_a_planted_mistake_is_found_with_a_way_to_it(bug: Bug, limits: Limits, rule: str, last_steps: list[str]) -> None:
    found = search(limits, bug)
    sys.stdout.write(f"{bug.name}\n{found}\n")  # Shown by pytest -rP.
    assert found.problem is not None
    assert found.problem.startswith(rule)
    assert [" ".join(step) for step in found.trace][-len(last_steps) :] == last_steps


class RealBooks:
    """The real ledger on a real Redis, to which the model's steps happen."""

    def __init__(self, agents: AdmissionLedger, trainer: TrainingLedger, consumer: TrajectoryConsumer) -> None:
        self._agents = agents
        self._trainer = trainer
        self._consumer = consumer
        self._records: dict[str, GroupRecord] = {}
        self._delivered: dict[str, tuple[int, int]] = {}

    async def take(self, step: Step, before: State) -> Step:
        """The step, as it happened: of several groups that may be adopted, the ledger chooses.

        Raises: AssertionError if the ledger answers otherwise than the model.
        """
        match step:
            case ("trainer", what, *words):
                self._trainer_acts(what, words, before)
            case ("lease of", number, _):
                owner = before.redis.groups[int(number)].owner
                assert await self._agents.renew(owner=f"agent {owner}", lease_ms=0, group_ids=[f"g{number}"]) == []
            case (agent, what, *words):
                return await self._agent_acts(agent, what, words, before)
        return step

    async def _agent_acts(self, agent: str, what: str, words: list[str], before: State) -> Step:
        number, _, index = words[0].partition(".") if words else ("", "", "")
        group_id = f"g{number}"
        match what:
            case "admit":
                record = await self._admit(group_id, agent)
                assert record is not None
                self._records[group_id] = record
            case "adopt":
                adopted = await self._agents.adopt(owner=agent, lease_ms=LONG_MS)
                assert adopted is not None
                record, finished = adopted
                number = record.group_id.removeprefix("g")
                bits = before.redis.groups[int(number)].finished
                assert finished == [index for index in range(model.GROUP_SIZE) if bits >> index & 1]
                return agent, "adopt", number
            case "renew":
                assert await self._agents.renew(owner=agent, lease_ms=LONG_MS, group_ids=[group_id]) == [group_id]
            case "finish":
                receipt = await self._agents.finish(finished_episode(self._records[group_id], int(index)))
                assert receipt == words[1].partition(",")[0]
            case "discard":
                assert await self._agents.discard([group_id], DiscardReason.ENVIRONMENT_GONE, requeue=False) == 1
        return agent, what, *words

    async def _admit(self, group_id: str, owner: str) -> GroupRecord | None:
        return await self._agents.admit(
            group_id=group_id, environment="e", group_size=model.GROUP_SIZE, owner=owner, lease_ms=LONG_MS
        )

    def _trainer_acts(self, what: str, words: list[str], before: State) -> None:
        match what:
            case "restore":
                disk = before.durable
                trained = len({group for group, _ in disk.learnt})
                self._trainer.restore(int(words[0]), [f"g{number}" for number in disk.groups], trained=trained)
            case "learn":
                oldest = self._trainer.live_groups().ready[0]
                assert (oldest.record.group_id, oldest.num_episodes) == (f"g{words[0]}", before.redis.groups[int(words[0])].count)
            case "publish" if words[-1] == "refused":
                with pytest.raises(LedgerError):
                    self._trainer.publish(int(words[0]), [f"g{words[1]}"])
            case "publish":
                self._trainer.publish(int(words[0]), [f"g{words[1]}"])
            case "acknowledge":
                self._trainer.acknowledge(int(words[0]))

    async def require_equal(self, state: State) -> None:
        """Raises: AssertionError unless the books and the stream are those of the model."""
        books, wanted = self._trainer.books(), state.redis
        stages = [group.stage for group in wanted.groups]
        assert (books.version, books.started, books.trained, sum(books.discarded.values())) == (
            wanted.version,
            wanted.started,
            wanted.trained,
            wanted.discarded,
        )
        assert (books.running, books.ready, books.unsaved) == tuple(map(stages.count, (model.RUNNING, model.READY, model.UNSAVED)))
        assert books.is_balanced
        for delivery in self._consumer.read(block_ms=1):
            self._delivered[delivery.entry_id] = (int(delivery.trajectory.group_id[1:]), delivery.trajectory.sample_index)
        live = {delivery.entry_id for delivery in self._consumer.redelivered()}
        assert sorted(self._delivered[entry_id] for entry_id in live) == list(wanted.entries)
        assert books.stream_entries == len(wanted.entries)
        if model.WAITING in stages and model._admit(wanted, 0) is None:
            assert await self._admit("one too many", "agent 0") is None


@pytest.fixture
async def real(redis_url: str, redis_client: redis.Redis, keys: Keys) -> AsyncIterator[RealBooks]:
    async with redis.asyncio.Redis.from_url(redis_url) as client:
        agents, trainer = AdmissionLedger(client, keys), TrainingLedger(redis_client, keys)
        await agents.configure(async_generation_ratio=model.RATIO, batch_groups=1)
        trainer.create_consumer_group()
        yield RealBooks(agents, trainer, TrajectoryConsumer(redis_client, keys, trainer))


async def play(real: RealBooks, state: State, step: Step, bugs: Bug = Bug.NONE) -> State:
    taken = await real.take(step, state)
    after = dict(model.steps(state, bugs))[taken]
    await real.require_equal(after)
    return after


@pytest.mark.parametrize("seed", range(NUM_WALKS))
async def test_the_real_ledger_does_what_the_model_does(real: RealBooks, seed: int) -> None:
    """Weighted, so that walks get as far as checkpoints and the mishaps come in between."""
    chance = random.Random(seed)
    state = model.initial(Limits(groups=4, agent_crashes=2, lost_replies=4))
    for _ in range(WALK_STEPS):
        choices = [step for step, _ in model.steps(state)]
        if not choices:
            break
        rare = {"dies", "discard", "runs out"}
        weights = [1 if rare & {*step} or "lost" in step[-1] else 6 for step in choices]
        state = await play(real, state, chance.choices(choices, weights)[0])


def test_walks_take_every_kind_of_step() -> None:
    kinds = set()
    for seed in range(NUM_WALKS):
        chance, state = random.Random(seed), model.initial(Limits(groups=4, agent_crashes=2, lost_replies=4))
        for _ in range(WALK_STEPS):
            if choices := list(model.steps(state)):
                step, state = chance.choice(choices)
                kinds.add((step[0].partition(" ")[0], step[1] if step[0] != "lease of" else step[2]))
    trainer = {("trainer", kind) for kind in ("restore", "learn", "publish", "save", "durable", "acknowledge", "dies")}
    agents = {("agent", kind) for kind in ("admit", "finish", "adopt", "renew", "discard", "dies")}
    assert kinds == trainer | agents | {("lease", "runs out")}


@pytest.mark.parametrize("bug", [Bug.LEASE_TOO_SHORT, Bug.VERSION_COUNTED_TWICE, Bug.UNSAVED_FORGOTTEN], ids=lambda bug: bug.name)
async def test_the_real_ledger_does_not_make_the_planted_mistakes(real: RealBooks, bug: Bug) -> None:
    """On the way that led the model into its mistake, the ledger parts from it."""
    limits = FEW._replace(lost_replies=1) if bug is Bug.VERSION_COUNTED_TWICE else FEW._replace(agent_crashes=0)
    trace = search(limits, bug).trace
    state = model.initial(limits)
    for step in trace[:-1]:
        state = await play(real, state, step, bug)
    with pytest.raises(AssertionError):
        await play(real, state, trace[-1], bug)
