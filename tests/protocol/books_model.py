"""The protocol that decides "nothing lost, nothing trained twice", small enough to be searched: ledger, leases, checkpoints.

Transitions of Redis mirror shared/lua (named after the script), the trainer's mirror trainer/step.py and trainer/checkpoints.py,
the agents' services/env_agents/rollout_loop.py. Between any two of them an agent or the trainer may die, a lease may run out (its
owner dead, stopped or only slow), the reply of a call may be lost, which is then repeated, and Redis may lose its last write. A
test plays the same steps on the real ledger.

One group is a batch (B = 1), a group is two episodes, α = 1.
"""

from collections.abc import Iterator
from enum import Flag, auto
from itertools import chain
from typing import NamedTuple

from tests.protocol.search import Step

GROUP_SIZE = 2
ALL = (1 << GROUP_SIZE) - 1
RATIO = 1

WAITING, RUNNING, READY, UNSAVED, SAVED, DISCARDED = "waiting", "running", "ready", "unsaved", "saved", "discarded"
DOWN, IDLE, LEARNT = "down", "idle", "learnt"
"""Of the trainer: between two updates; an update is in its memory and not in the books."""

_STAGES = (WAITING, RUNNING, READY, UNSAVED, SAVED, DISCARDED)

Episode = tuple[int, int]
"""Group, sample index."""


class Bug(Flag):
    """What a protocol with a mistake in it does otherwise."""

    NONE = 0
    ACKNOWLEDGED_TOO_EARLY = auto()
    """The trainer acknowledges when it begins to write a checkpoint, not when that is durable."""
    LEASE_TOO_SHORT = auto()
    """A finished episode is recorded for whoever brings it: nothing but the lease keeps two owners apart, and it can run out."""
    VERSION_COUNTED_TWICE = auto()
    """A publication that is repeated because its reply was lost counts again."""
    UNSAVED_FORGOTTEN = auto()
    """A trainer that resumes leaves what was trained after its checkpoint as trained."""


class Limits(NamedTuple):
    """How much happens in one search."""

    groups: int = 2
    agents: int = 2
    agent_crashes: int = 1
    trainer_crashes: int = 2
    lost_replies: int = 1
    lost_writes: int = 0
    """Writes that Redis answered and has not any more after it was killed: its file is synced every second."""
    expired_leases: int = 2
    discards: int = 1


class Group(NamedTuple):
    stage: str = WAITING
    owner: int = -1
    is_expired: bool = False
    finished: int = 0
    """Bit by sample index that has a record."""
    count: int = 0
    """Of records, as the ledger counts them."""
    trained_at: int = 0


class Redis(NamedTuple):
    groups: tuple[Group, ...]
    entries: tuple[Episode, ...] = ()
    """The stream."""
    version: int = 0
    saved_version: int = 0
    started: int = 0
    trained: int = 0
    discarded: int = 0

    def with_group(self, number: int, group: Group) -> "Redis":
        return self._replace(groups=(*self.groups[:number], group, *self.groups[number + 1 :]))


class Checkpoint(NamedTuple):
    version: int = 0
    learnt: tuple[Episode, ...] = ()
    """What its weights have learnt, over the whole lineage."""
    groups: tuple[int, ...] = ()
    """Trained since the checkpoint before."""


class Trainer(NamedTuple):
    stage: str = DOWN
    version: int = 0
    learnt: tuple[Episode, ...] = ()
    batch: int = -1
    unsaved: tuple[int, ...] = ()
    saving: Checkpoint | None = None
    """What its threads write."""
    to_acknowledge: int = -1
    """Version of a checkpoint that is durable and not acknowledged."""


class State(NamedTuple):
    redis: Redis
    playing: tuple[tuple[int, ...], ...]
    """By agent and group: bits of the episodes that it plays."""
    told: tuple[Episode, ...] = ()
    """Finished episodes whose agent was told that they are recorded."""
    trainer: Trainer = Trainer()
    durable: Checkpoint = Checkpoint()
    """The newest on disk."""
    left: Limits = Limits()
    """What may still happen."""
    before: Redis | None = None
    """Redis before its last write, where that can be lost."""
    has_lost_a_write: bool = False


def initial(limits: Limits) -> State:
    nothing = (0,) * limits.groups
    return State(Redis((Group(),) * limits.groups), (nothing,) * limits.agents, left=limits)


def steps(state: State, bugs: Bug = Bug.NONE) -> Iterator[tuple[Step, State]]:
    """Everything that can happen next."""
    return chain(_agents_act(state, bugs), _trainer_acts(state, bugs), _something_fails(state))


def broken_rule(state: State) -> str | None:
    """The rule that a state breaks, with what breaks it."""
    redis, trainer = state.redis, state.trainer
    in_stage = {stage: [g for g, group in enumerate(redis.groups) if group.stage == stage] for stage in _STAGES}
    books = (len(in_stage[RUNNING]), len(in_stage[READY]), redis.trained, redis.discarded)
    if redis.started != sum(books):
        return f"the books balance: {redis.started} started, and {' + '.join(map(str, books))} running, ready, trained, discarded"
    if redis.trained != len(in_stage[UNSAVED]) + len(in_stage[SAVED]):
        return f"the books say what is trained: {redis.trained}, and {in_stage[UNSAVED]} unsaved and {in_stage[SAVED]} saved are"
    for number, group in enumerate(redis.groups):
        if group.count != group.finished.bit_count():
            return f"an episode counts once: group {number} counts {group.count} finished ones and has {group.finished.bit_count()}"
    if len(set(redis.entries)) < len(redis.entries):
        return f"an episode is in the stream once: {redis.entries}"
    for checkpoint in (state.durable, trainer.saving or state.durable):
        if len(set(checkpoint.learnt)) < len(checkpoint.learnt):
            return f"none is trained twice in one lineage of checkpoints: version {checkpoint.version} learnt {checkpoint.learnt}"
    kept = {*redis.entries, *state.durable.learnt}
    for group, index in state.told:
        if (group, index) not in kept and redis.groups[group].stage != DISCARDED:
            return f"no finished episode is lost: {group}.{index} is neither in the stream nor in the checkpoint on disk"
    if trainer.stage == IDLE and not state.has_lost_a_write:
        if redis.version != trainer.version:
            return f"a version is a number of updates: the books are at {redis.version}, the weights at {trainer.version}"
        learnt = {group for group, _ in trainer.learnt}
        if learnt != {*in_stage[UNSAVED], *in_stage[SAVED]}:
            return f"what the books call trained is what the weights learnt: {in_stage[UNSAVED]}, {in_stage[SAVED]}, {learnt}"
    return None


def is_end(state: State) -> bool:
    """Every group is discarded or in a checkpoint on disk, and the trainer lives.

    The checkpoint is acknowledged too, unless Redis lost that it was: then the next one, which this model has no room for, does it.
    """
    redis, disk = state.redis, state.durable
    is_acknowledged = redis.saved_version == disk.version
    return (
        all(
            group.stage in (SAVED, DISCARDED) or (group.stage == UNSAVED and group.trained_at <= disk.version)
            for group in redis.groups
        )
        and state.trainer.stage == IDLE
        and disk.version == redis.version
        and (is_acknowledged or state.has_lost_a_write)
    )


def canonical(state: State) -> State:
    """One of the states that differ only in which agent, and which episode of a running group, is called what."""
    redis, playing, told = state.redis, state.playing, state.told
    for number, group in enumerate(redis.groups):
        if group.stage == RUNNING and state.before is None:
            bits = [(*(part[number] >> index & 1 for part in playing), group.finished >> index & 1) for index in range(2)]
            known = [[(number, index) in told for index in range(2)], [(number, index) in redis.entries for index in range(2)]]
            if (bits[0], known[0][0], known[1][0]) > (bits[1], known[0][1], known[1][1]):
                redis = redis.with_group(number, group._replace(finished=_SWAPPED[group.finished]))
                redis = redis._replace(entries=_with_swapped(redis.entries, number))
                told = _with_swapped(told, number)
                playing = tuple((*part[:number], _SWAPPED[part[number]], *part[number + 1 :]) for part in playing)
    if len(playing) == 2 and state.before is None:
        owned = [tuple(group.owner == agent for group in redis.groups) for agent in range(2)]
        if (playing[0], owned[0]) > (playing[1], owned[1]):
            playing = playing[::-1]
            groups = (group if group.owner < 0 else group._replace(owner=1 - group.owner) for group in redis.groups)
            redis = redis._replace(groups=tuple(groups))
    return state._replace(redis=redis, playing=playing, told=told)


_SWAPPED = (0b00, 0b10, 0b01, 0b11)


def _with_swapped(episodes: tuple[Episode, ...], number: int) -> tuple[Episode, ...]:
    return tuple(sorted((group, 1 - index if group == number else index) for group, index in episodes))


def _agents_act(state: State, bugs: Bug) -> Iterator[tuple[Step, State]]:
    redis = state.redis
    for agent, playing in enumerate(state.playing):
        name = f"agent {agent}"
        if (admitted := _admit(redis, agent)) is not None:
            number, after = admitted
            yield (name, "admit", f"{number}"), _plays(_wrote(state, after), agent, number, ALL)
        for number, group in enumerate(redis.groups):
            if group.stage == RUNNING and group.is_expired:
                after = redis.with_group(number, group._replace(owner=agent, is_expired=False))
                yield (name, "adopt", f"{number}"), _plays(_wrote(state, after), agent, number, ALL & ~group.finished)
            if playing[number] and not (group.stage == RUNNING and group.owner == agent):
                yield (name, "renew", f"{number}"), _plays(state, agent, number, 0)
            for index in _indexes(playing[number]):
                receipt, after = _finish(redis, number, index, bugs)
                wrote = _wrote(state, after) if receipt == "recorded" else state
                is_told = receipt in ("recorded", "duplicate") and (number, index) not in state.told
                told = wrote._replace(told=tuple(sorted((*state.told, (number, index))))) if is_told else wrote
                step = (name, "finish", f"{number}.{index}")
                yield (*step, receipt), _plays(told, agent, number, playing[number] & ~(1 << index))
                if receipt == "recorded" and state.left.lost_replies:
                    yield (*step, "recorded, and the reply is lost"), _spent(wrote, lost_replies=1)
        if state.left.discards:
            for number, group in enumerate(redis.groups):
                if group.stage == RUNNING and group.owner == agent:
                    after = _discard(redis, number)
                    yield (name, "discard", f"{number}"), _plays(_spent(_wrote(state, after), discards=1), agent, number, 0)


def _admit(redis: Redis, agent: int) -> tuple[int, Redis] | None:
    """admit.lua: the next group, while started - discarded stays within (v + 1 + α) · B."""
    if redis.started - redis.discarded + 1 > redis.version + 1 + RATIO:
        return None
    number = next((number for number, group in enumerate(redis.groups) if group.stage == WAITING), None)
    if number is None:
        return None
    return number, redis.with_group(number, Group(RUNNING, agent))._replace(started=redis.started + 1)


def _finish(redis: Redis, number: int, index: int, bugs: Bug) -> tuple[str, Redis]:
    """finish.lua."""
    group = redis.groups[number]
    if group.stage in (SAVED, DISCARDED, WAITING):
        return "gone", redis
    if group.finished & (1 << index) and Bug.LEASE_TOO_SHORT not in bugs:
        return "duplicate", redis
    if group.stage != RUNNING:
        return "surplus", redis
    group = group._replace(finished=group.finished | (1 << index), count=group.count + 1)
    if group.count >= GROUP_SIZE:
        group = group._replace(stage=READY, owner=-1, is_expired=False)
    return "recorded", redis.with_group(number, group)._replace(entries=tuple(sorted((*redis.entries, (number, index)))))


def _discard(redis: Redis, number: int) -> Redis:
    """discard.lua."""
    return _without_entries(redis.with_group(number, Group(DISCARDED)), number)._replace(discarded=redis.discarded + 1)


def _without_entries(redis: Redis, number: int) -> Redis:
    return redis._replace(entries=tuple(entry for entry in redis.entries if entry[0] != number))


def _trainer_acts(state: State, bugs: Bug) -> Iterator[tuple[Step, State]]:
    redis, trainer, disk = state.redis, state.trainer, state.durable
    if trainer.stage == DOWN:
        resumed = Trainer(IDLE, disk.version, disk.learnt)
        after = _restore(redis, disk, bugs)
        yield ("trainer", "restore", f"{disk.version}"), _wrote(state, after)._replace(trainer=resumed)
        return
    if trainer.saving is not None:
        done = trainer._replace(saving=None, to_acknowledge=trainer.saving.version)
        yield ("trainer", "durable", f"{trainer.saving.version}"), state._replace(trainer=done, durable=trainer.saving)
    if trainer.stage == IDLE:
        yield from _trainer_is_idle(state, bugs)
        return
    version, after = trainer.version, _publish(redis, trainer.version, trainer.batch, bugs)
    if after is None:
        yield ("trainer", "publish", f"{version}", f"{trainer.batch}", "refused"), state._replace(trainer=Trainer())
        return
    published = trainer._replace(stage=IDLE, batch=-1, unsaved=(*trainer.unsaved, trainer.batch))
    step = ("trainer", "publish", f"{version}", f"{trainer.batch}")
    wrote = _wrote(state, after) if after != redis else state
    yield step, wrote._replace(trainer=published)
    if state.left.lost_replies:
        yield (*step, "and the reply is lost"), _spent(wrote, lost_replies=1)


def _trainer_is_idle(state: State, bugs: Bug) -> Iterator[tuple[Step, State]]:
    redis, trainer = state.redis, state.trainer
    oldest = next((number for number, group in enumerate(redis.groups) if group.stage == READY), None)
    if oldest is not None:
        # GroupAssembler takes each sample index once, and waits for as many as the ledger counts.
        episodes = sorted({entry for entry in redis.entries if entry[0] == oldest})
        if len(episodes) == redis.groups[oldest].count:
            learnt = tuple(sorted((*trainer.learnt, *episodes)))
            updated = trainer._replace(stage=LEARNT, version=trainer.version + 1, learnt=learnt, batch=oldest)
            yield ("trainer", "learn", f"{oldest}"), state._replace(trainer=updated)
    if redis.version != trainer.version:
        # Redis lost what made them equal. The next groups, which this model has no room for, end it: publish.lua refuses.
        yield ("trainer", "publish", f"{trainer.version + 1}", "refused"), state._replace(trainer=Trainer())
    if trainer.unsaved and trainer.saving is None and trainer.to_acknowledge < 0:
        saving = Checkpoint(trainer.version, trainer.learnt, trainer.unsaved)
        begun = trainer._replace(saving=saving, unsaved=())
        yield ("trainer", "save", f"{trainer.version}"), state._replace(trainer=begun)
    early = trainer.saving.version if Bug.ACKNOWLEDGED_TOO_EARLY in bugs and trainer.saving else -1
    version = max(trainer.to_acknowledge, early)
    if version > redis.saved_version:
        wrote = _wrote(state, _acknowledge(redis, version))
        step = ("trainer", "acknowledge", f"{version}")
        yield step, wrote._replace(trainer=trainer._replace(to_acknowledge=-1))
        if state.left.lost_replies:
            yield (*step, "and the reply is lost"), _spent(wrote, lost_replies=1)
    elif trainer.to_acknowledge >= 0:
        yield ("trainer", "acknowledge", f"{version}"), state._replace(trainer=trainer._replace(to_acknowledge=-1))


def _publish(redis: Redis, version: int, number: int, bugs: Bug) -> Redis | None:
    """publish.lua; None if it refuses."""
    group = redis.groups[number]
    is_repeated = version == redis.version and group.stage == UNSAVED and group.trained_at == version
    if is_repeated:
        if Bug.VERSION_COUNTED_TWICE not in bugs:
            return redis
        return redis._replace(version=version + 1, trained=redis.trained + 1)
    if version != redis.version + 1 or group.stage != READY:
        return None
    after = redis.with_group(number, group._replace(stage=UNSAVED, trained_at=version))
    return after._replace(version=version, trained=redis.trained + 1)


def _acknowledge(redis: Redis, version: int) -> Redis:
    """acknowledge.lua."""
    for number, group in enumerate(redis.groups):
        if group.stage == UNSAVED and group.trained_at <= version:
            redis = _without_entries(redis.with_group(number, Group(SAVED)), number)
    return redis._replace(saved_version=version)


def _restore(redis: Redis, disk: Checkpoint, bugs: Bug) -> Redis:
    """acknowledge.lua and restore.lua, one after the other, as TrainingLedger.restore calls them."""
    redis = _acknowledge(redis, disk.version)
    trained = redis.trained
    for number, group in enumerate(redis.groups):
        if group.stage == UNSAVED and Bug.UNSAVED_FORGOTTEN not in bugs:
            redis = redis.with_group(number, group._replace(stage=READY, trained_at=0))
            trained -= 1
    for number in disk.groups:
        if redis.groups[number].stage == READY:
            redis = _without_entries(redis.with_group(number, Group(SAVED)), number)
            trained += 1
    return redis._replace(version=disk.version, trained=trained)


def _something_fails(state: State) -> Iterator[tuple[Step, State]]:
    left, redis = state.left, state.redis
    if left.agent_crashes:
        for agent, playing in enumerate(state.playing):
            if any(playing):
                nothing = (0,) * len(playing)
                after = (*state.playing[:agent], nothing, *state.playing[agent + 1 :])
                yield (f"agent {agent}", "dies"), _spent(state, agent_crashes=1)._replace(playing=after)
    if left.trainer_crashes and state.trainer.stage != DOWN:
        yield ("trainer", "dies"), _spent(state, trainer_crashes=1)._replace(trainer=Trainer())
    for number, group in enumerate(redis.groups):
        if group.stage == RUNNING and not group.is_expired:
            is_abandoned = not state.playing[group.owner][number]
            if left.expired_leases or is_abandoned:
                expired = state._replace(redis=redis.with_group(number, group._replace(is_expired=True)))
                yield ("lease of", f"{number}", "runs out"), expired if is_abandoned else _spent(expired, expired_leases=1)
    if left.lost_writes and state.before is not None:
        lost = _spent(state, lost_writes=1)
        told = tuple(episode for episode in state.told if episode in {*state.before.entries, *state.durable.learnt})
        yield ("Redis", "loses its last write"), lost._replace(redis=state.before, before=None, told=told, has_lost_a_write=True)


def _wrote(state: State, redis: Redis) -> State:
    return state._replace(redis=redis, before=state.redis if state.left.lost_writes else None)


def _spent(state: State, **counts: int) -> State:
    left = state.left._replace(**{name: getattr(state.left, name) - count for name, count in counts.items()})
    return state._replace(left=left)


def _plays(state: State, agent: int, number: int, bits: int) -> State:
    playing = state.playing[agent]
    if playing[number] == bits:
        return state
    changed = (*playing[:number], bits, *playing[number + 1 :])
    return state._replace(playing=(*state.playing[:agent], changed, *state.playing[agent + 1 :]))


def _indexes(bits: int) -> Iterator[int]:
    return (index for index in range(GROUP_SIZE) if bits & (1 << index))
