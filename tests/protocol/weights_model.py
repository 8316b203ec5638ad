"""The protocol by which weights reach engines, small enough to be searched: hub, engines, a trainer that goes back to checkpoints.

A set of weights is two buckets. The hub's steps mirror services/inference_hub/weight_updates.py, its probes probes.py; whether it
routes to an engine is decided by the real `Engine.state` (engines.py). Between any two steps trainer, hub or an engine may die, and
the hub may be late to notice that an engine did. Weights are named by the life of the trainer that made them, which nobody in the
protocol sees: what it sees is a version, and an epoch that a trainer brings.
"""

from collections.abc import Iterator
from enum import Flag, auto
from functools import cache
from itertools import chain
from typing import Any, NamedTuple, cast

from services.inference_hub.engines import INITIAL_EPOCH, Engine, EngineState, WeightsInForce
from tests.protocol.search import Step

NUM_BUCKETS = 2

Weights = tuple[int, int]
"""Version, and the life of the trainer that trained it."""
INITIAL: Weights = (0, 0)
InForce = tuple[int, str]
"""Version, and epoch: as the hub names weights."""
INITIALLY_IN_FORCE: InForce = (0, INITIAL_EPOCH)


class Bug(Flag):
    """What a protocol with a mistake in it does otherwise."""

    NONE = 0
    MARKED_TOO_LATE = auto()
    """Redis is told that engines hold part of a set when they have loaded a bucket, not before."""
    EPOCH_KEPT = auto()
    """A trainer that goes back to a checkpoint pushes under the epoch that it had: its next versions are counted a second time."""
    RESUMED_WITH_PART = auto()
    """An update that fails before its first bucket lets all its engines go on, also one that holds part of an earlier set."""
    COMMITTED_WITHOUT_ALL = auto()
    """A commit is taken when the last bucket was sent, not when every engine has loaded it."""


class Limits(NamedTuple):
    engines: int = 2
    versions: int = 2
    trainer_crashes: int = 1
    hub_crashes: int = 1
    engine_crashes: int = 1


class Server(NamedTuple):
    """An engine as it is."""

    buckets: tuple[Weights, ...] = (INITIAL,) * NUM_BUCKETS
    label: int = 0
    is_paused: bool = False
    has_session: bool = False
    """It takes part in the update that the hub knows of."""


class Known(NamedTuple):
    """An engine as the hub knows it."""

    version: int = -1
    epoch: str = INITIAL_EPOCH
    is_incomplete: bool = False
    is_verified: bool = False
    is_updating: bool = False


class Stored(NamedTuple):
    """What the hub has in Redis."""

    in_force: InForce
    engines: tuple[tuple[str, bool], ...]
    """Epoch, whether it may hold part of a set."""


class Update(NamedTuple):
    weights: Weights
    epoch: str
    members: tuple[int, ...]
    num_announced: int = 0
    """Buckets that engines were asked to load."""
    loaded: tuple[int, ...] = ()
    """Engines that have loaded the newest of them."""


class Trainer(NamedTuple):
    life: int = 1
    weights: Weights = INITIAL
    is_pushing: bool = True
    """Its newest weights are not in force yet: at its start, and after each update."""


class State(NamedTuple):
    servers: tuple[Server, ...]
    known: tuple[Known, ...]
    in_force: InForce
    stored: Stored
    update: Update | None
    trainer: Trainer
    saved: Weights
    """Those of the newest checkpoint."""
    left: Limits


def initial(limits: Limits) -> State:
    count = limits.engines
    stored = Stored(INITIALLY_IN_FORCE, ((INITIAL_EPOCH, False),) * count)
    return State((Server(),) * count, (Known(),) * count, INITIALLY_IN_FORCE, stored, None, Trainer(), INITIAL, limits)


def canonical(state: State) -> State:
    """One of the states that differ only in which engine is called what."""
    update, count = state.update, len(state.servers)

    def seen(number: int) -> tuple[Any, ...]:
        taking_part = () if update is None else (number in update.members, number in update.loaded)
        return state.servers[number], state.known[number], state.stored.engines[number], taking_part

    order = sorted(range(count), key=seen)
    if order == list(range(count)):
        return state
    if update is not None:
        place = {number: index for index, number in enumerate(order)}
        members, loaded = (tuple(sorted(place[number] for number in numbers)) for numbers in (update.members, update.loaded))
        update = update._replace(members=members, loaded=loaded)
    servers, known, engines = (tuple(parts[n] for n in order) for parts in (state.servers, state.known, state.stored.engines))
    return state._replace(servers=servers, known=known, stored=state.stored._replace(engines=engines), update=update)


def steps(state: State, bugs: Bug = Bug.NONE) -> Iterator[tuple[Step, State]]:
    """Everything that can happen next."""
    return chain(_trainer_acts(state, bugs), _hub_acts(state, bugs), _engines_act(state, bugs), _something_dies(state))


def is_end(state: State) -> bool:
    """The last version is in force on every engine, and the trainer knows."""
    trainer = state.trainer
    return (
        trainer.weights[0] == state.left.versions
        and not trainer.is_pushing
        and all(_is_routed(state, engine) for engine in range(len(state.servers)))
    )


def broken_rule(state: State) -> str | None:
    """The rule that a state breaks, with what breaks it."""
    trainer = state.trainer
    for number, server in enumerate(state.servers):
        if server.is_paused:
            continue
        if len(set(server.buckets)) > 1:
            return f"no engine generates with an incomplete set: engine {number} has {server.buckets}"
        version, life = server.buckets[0]
        if version != server.label:
            return f"a token's version is that of its weights: engine {number} says {server.label} and has {server.buckets[0]}"
        is_current = not trainer.is_pushing and state.update is None and server.label == trainer.weights[0]
        if _is_routed(state, number) and is_current and server.buckets[0] != trainer.weights:
            return (
                f"a version is one set of weights: engine {number} answers for version {version} with those that life {life} of "
                f"the trainer made, and the trainer believes that those of life {trainer.weights[1]} are in force"
            )
    return None


@cache
def is_ready(known: Known, in_force: InForce) -> bool:
    """The real decision."""
    engine = Engine("id", "url", cast(Any, None), synced_epoch=known.epoch, is_incomplete=known.is_incomplete)
    engine.is_verified = known.is_verified
    engine.version = None if known.version < 0 else known.version
    return engine.state(WeightsInForce(*in_force)) is EngineState.READY


def _is_routed(state: State, number: int) -> bool:
    known = state.known[number]
    return not known.is_updating and is_ready(known, state.in_force)


def _epoch(life: int, bugs: Bug) -> str:
    return "e1" if Bug.EPOCH_KEPT in bugs else f"e{life}"


def _trainer_acts(state: State, bugs: Bug) -> Iterator[tuple[Step, State]]:
    trainer, update = state.trainer, state.update
    version, epoch = trainer.weights[0], _epoch(trainer.life, bugs)
    if not trainer.is_pushing:
        if version < state.left.versions:
            updated = trainer._replace(weights=(version + 1, trainer.life), is_pushing=True)
            yield ("trainer", "trains", f"version {version + 1}"), state._replace(trainer=updated)
        if state.saved != trainer.weights:
            yield ("trainer", "saves", f"version {version}"), state._replace(saved=trainer.weights)
        late = tuple(n for n, known in enumerate(state.known) if known.is_verified and not is_ready(known, state.in_force))
        if late and update is None and state.in_force == (version, epoch):
            yield ("trainer", "catches up", _names(late)), _begun(state, epoch, late)
        return
    if update is not None and update.epoch == epoch and update.weights == trainer.weights:
        return
    live = tuple(n for n, known in enumerate(state.known) if known.is_verified)
    if not live:
        return
    in_force = state.in_force
    if in_force[1] == epoch and version <= in_force[0]:
        if version == in_force[0] and all(is_ready(state.known[n], in_force) and not state.known[n].is_updating for n in live):
            step = ("trainer", "begins", f"version {version}", "already in force")
            yield step, state._replace(trainer=trainer._replace(is_pushing=False))
        if version < in_force[0]:
            # NotNewerError. A trainer of an epoch of its own never meets it; one that does trains on.
            yield ("trainer", "begins", f"version {version}", "refused"), state._replace(trainer=trainer._replace(is_pushing=False))
            return
    # A new weight group ends what is unfinished.
    yield ("trainer", "begins", f"version {version}", _names(live)), _begun(_failed(state, bugs), epoch, live)


def _begun(state: State, epoch: str, members: tuple[int, ...]) -> State:
    """_prepare: no new calls, paused, sessions open."""
    weights = state.trainer.weights
    servers = _changed(state.servers, members, is_paused=True, has_session=True)
    known = _changed(state.known, members, is_updating=True)
    return state._replace(servers=servers, known=known, update=Update(weights, epoch, members, loaded=members))


def _hub_acts(state: State, bugs: Bug) -> Iterator[tuple[Step, State]]:
    update = state.update
    for number, (server, known) in enumerate(zip(state.servers, state.known, strict=True)):
        if not known.is_verified:
            can_generate = not known.is_incomplete and not known.is_updating
            verified = known._replace(is_verified=True, version=server.label)
            resumed = server._replace(is_paused=server.is_paused and not can_generate)
            after = state._replace(known=_with(state.known, number, verified), servers=_with(state.servers, number, resumed))
            yield ("hub", "verifies", f"engine {number}"), after
        elif known.version != server.label and not known.is_updating:
            yield (
                ("hub", "probes", f"engine {number}"),
                state._replace(known=_with(state.known, number, known._replace(version=server.label))),
            )
    if update is None:
        return
    yield ("hub", "gives the update up"), _failed(state, bugs)
    is_loaded = set(update.loaded) >= set(update.members)
    if update.num_announced < NUM_BUCKETS and is_loaded:
        announced = update._replace(num_announced=update.num_announced + 1, loaded=())
        after = state._replace(update=announced)
        yield (
            ("hub", "asks for", f"bucket {announced.num_announced}"),
            (after if Bug.MARKED_TOO_LATE in bugs else _marked(after, update.members)),
        )
    if update.num_announced == NUM_BUCKETS and (is_loaded or Bug.COMMITTED_WITHOUT_ALL in bugs):
        yield from _committed(state, update, bugs)


def _marked(state: State, members: tuple[int, ...]) -> State:
    """mark_incomplete: in memory and in Redis."""
    known = _changed(state.known, members, is_incomplete=True)
    engines = tuple((epoch, was or n in members) for n, (epoch, was) in enumerate(state.stored.engines))
    return state._replace(known=known, stored=state.stored._replace(engines=engines))


def _committed(state: State, update: Update, bugs: Bug) -> Iterator[tuple[Step, State]]:
    """put_in_force, then generation goes on; the trainer hears of it, or does not."""
    version = update.weights[0]
    known = _changed(state.known, update.members, version=version, epoch=update.epoch, is_incomplete=False, is_updating=False)
    engines = tuple((update.epoch, False) if n in update.members else entry for n, entry in enumerate(state.stored.engines))
    in_force = (version, update.epoch)
    stored = Stored(in_force, engines)
    servers = _changed(state.servers, update.members, is_paused=False, has_session=False)
    after = state._replace(known=known, stored=stored, in_force=in_force, servers=servers, update=None)
    is_its = update.weights == state.trainer.weights and update.epoch == _epoch(state.trainer.life, bugs)
    told = after._replace(trainer=state.trainer._replace(is_pushing=False)) if is_its else after
    yield ("hub", "commits", f"version {version}"), told
    if state.left.hub_crashes:
        yield ("hub", "commits", f"version {version}", "and dies before it answers"), _hub_restarts(after)


def _engines_act(state: State, bugs: Bug) -> Iterator[tuple[Step, State]]:
    update = state.update
    if update is None or not update.num_announced:
        return
    for number in update.members:
        server = state.servers[number]
        if number in update.loaded:
            continue
        bucket = update.num_announced - 1
        if not server.has_session:
            yield (f"engine {number}", "does not know the update"), _failed(state, bugs)
            continue
        buckets = (*server.buckets[:bucket], update.weights, *server.buckets[bucket + 1 :])
        label = update.weights[0] if update.num_announced == NUM_BUCKETS else server.label
        loaded = server._replace(buckets=buckets, label=label)
        after = state._replace(
            servers=_with(state.servers, number, loaded), update=update._replace(loaded=tuple(sorted((*update.loaded, number))))
        )
        step = (f"engine {number}", "loads", f"bucket {update.num_announced}")
        yield step, _marked(after, (number,)) if Bug.MARKED_TOO_LATE in bugs else after
        if state.left.hub_crashes:
            yield (*step, "after the hub died"), _hub_restarts(after)


def _failed(state: State, bugs: Bug) -> State:
    """_let_go: sessions end; engines go on unless they may hold part of the set."""
    update = state.update
    if update is None:
        return state
    servers = _changed(state.servers, update.members, has_session=False)
    if not update.num_announced:
        whole = tuple(n for n in update.members if not state.known[n].is_incomplete or Bug.RESUMED_WITH_PART in bugs)
        servers = _changed(servers, whole, is_paused=False)
    known = _changed(state.known, update.members, is_updating=False)
    return state._replace(servers=servers, known=known, update=None)


def _hub_restarts(state: State) -> State:
    """The memory is gone, and Redis is read."""
    known = tuple(Known(-1, epoch, is_incomplete) for epoch, is_incomplete in state.stored.engines)
    servers = tuple(server._replace(has_session=False) for server in state.servers)
    left = state.left._replace(hub_crashes=state.left.hub_crashes - 1)
    return state._replace(known=known, in_force=state.stored.in_force, update=None, servers=servers, left=left)


def _something_dies(state: State) -> Iterator[tuple[Step, State]]:
    left, trainer = state.left, state.trainer
    if left.hub_crashes:
        yield ("hub", "dies and starts again"), _hub_restarts(state)
    if left.trainer_crashes:
        again = Trainer(trainer.life + 1, state.saved)
        spent = left._replace(trainer_crashes=left.trainer_crashes - 1)
        yield ("trainer", "dies and resumes", f"version {again.weights[0]}"), state._replace(trainer=again, left=spent)
    if left.engine_crashes:
        spent = left._replace(engine_crashes=left.engine_crashes - 1)
        for number, known in enumerate(state.known):
            after = state._replace(servers=_with(state.servers, number, Server()), left=spent)
            yield (f"engine {number}", "starts again, unnoticed"), after
            lost = known._replace(is_verified=False)
            yield (f"engine {number}", "starts again"), after._replace(known=_with(state.known, number, lost))


def _changed(parts: tuple[Any, ...], numbers: tuple[int, ...], **changes: Any) -> tuple[Any, ...]:
    return tuple(part._replace(**changes) if number in numbers else part for number, part in enumerate(parts))


def _with(parts: tuple[Any, ...], number: int, part: Any) -> tuple[Any, ...]:
    return (*parts[:number], part, *parts[number + 1 :])


def _names(numbers: tuple[int, ...]) -> str:
    return f"on engines {', '.join(map(str, numbers))}"
