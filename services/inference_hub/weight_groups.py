"""The engines that a trainer pushes weights to together, and over `broadcast` the process group that carries them.

A group belongs to one life of a trainer, its epoch, and has a name that was never used before. Over `broadcast` the trainer is
rank 0, then come each engine's tensor-parallel ranks; an engine keeps an old process group until it is destroyed, and torch
refuses to reuse a name. Engines join while the trainer does: `/init_weights_update_group` blocks an engine's scheduler until every
rank is there. It is therefore sent only once the trainer listens at its address: an engine that is asked to join a trainer that has
died meanwhile would not generate again for torch's half an hour. The other transports have nothing to join.
"""

import asyncio
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Literal

from services.inference_hub.engine_client import EngineTimeoutError
from services.inference_hub.engines import Engine, EngineRegistry
from shared.configuration import WeightTransport
from shared.errors import EngineError

Backend = Literal["gloo", "nccl"]

DESTROY_TIMEOUT_S: Final = 10.0
LISTEN_POLL_S: Final = 0.1
KNOCK_TIMEOUT_S: Final = 2.0
TRAINER_RANKS: Final = 1


@dataclass(frozen=True)
class Member:
    """An engine's place in the group: ranks rank_offset … rank_offset + tensor_parallel_size - 1."""

    engine: Engine
    rank_offset: int
    tensor_parallel_size: int


@dataclass(frozen=True)
class Master:
    """Where the trainer's rank 0 waits for the engines, and how it sends."""

    address: str
    port: int
    backend: Backend
    transport: WeightTransport = "broadcast"
    presence_port: int = 0
    """Where it listens as long as it lives."""


@dataclass
class WeightGroup:
    """FORMING → ready (all engines joined) or failed, by `form`."""

    name: str
    epoch: str
    master: Master
    members: tuple[Member, ...]
    is_for_all: bool = True
    """It must have every live engine, not only those that were asked for."""
    formed: asyncio.Task[None] | None = None
    is_ready: bool = False
    problem: str | None = None
    engine_ids: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        self.engine_ids = frozenset(member.engine.id for member in self.members)

    @property
    def engines(self) -> list[Engine]:
        return [member.engine for member in self.members]

    @property
    def is_collective(self) -> bool:
        """One engine that fails leaves the others without what was sent."""
        return self.master.transport == "broadcast"

    @property
    def world_size(self) -> int:
        return TRAINER_RANKS + sum(member.tensor_parallel_size for member in self.members)

    def is_current(self, live: Iterable[Engine]) -> bool:
        """Whether its engines are all in it still and live, and, if it is for all, no other is live."""
        live_ids = {engine.id for engine in live}
        is_whole = all(engine.group_name == self.name for engine in self.engines)
        return is_whole and (self.engine_ids == live_ids if self.is_for_all else self.engine_ids <= live_ids)


def plan_group(epoch: str, master: Master, engines: Iterable[Engine], *, is_for_all: bool = True) -> WeightGroup:
    """Ranks in the order of the engines' ids, so that every engine joins groups in the same order."""
    members = []
    rank_offset = TRAINER_RANKS
    for engine in sorted(engines, key=lambda engine: engine.id):
        members.append(Member(engine, rank_offset, engine.tensor_parallel_size))
        rank_offset += engine.tensor_parallel_size
    return WeightGroup(f"headrace-{epoch}-{uuid.uuid4().hex[:8]}", epoch, master, tuple(members), is_for_all)


async def form(group: WeightGroup, registry: EngineRegistry, *, timeout_s: float) -> None:
    """Brings every engine into the group. The outcome is in the group: its task belongs to nobody who could catch it."""
    try:
        if group.is_collective:
            async with asyncio.timeout(timeout_s):
                await _listening(group.master)
            await _join_all(group, registry, timeout_s)
        else:
            await _claim_all(group)
    except TimeoutError:
        group.problem = (
            f"the trainer must listen at {group.master.address}:{group.master.port} within {timeout_s:g} s of POST /weight_groups, "
            "and does not; check weight_push and that the engines' machines reach that address"
        )
    except EngineError as error:
        group.problem = str(error)
    else:
        group.is_ready = True


async def wait_formed(group: WeightGroup, *, timeout_s: float) -> None:
    """Raises: EngineError that names the engine which did not join."""
    assert group.formed is not None
    await asyncio.wait((group.formed,), timeout=timeout_s)
    if not group.is_ready:
        problem = group.problem or f"its engines must join within {timeout_s:g} s, and did not; see the engines' logs"
        raise EngineError(f"weight group {group.name} is not ready: {problem}")


async def is_listening(host: str, port: int) -> bool:
    """Whether something accepts connections there."""
    try:
        async with asyncio.timeout(KNOCK_TIMEOUT_S):
            _, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError, UnicodeError):  # The last one of a name that no host can have.
        return False
    writer.close()
    return True


async def _join_all(group: WeightGroup, registry: EngineRegistry, timeout_s: float) -> None:
    """Raises: EngineError of one that did not join, once every other has answered or is lost: the next group is without those."""
    joins = (_join(group, member, registry, timeout_s) for member in group.members)
    errors = [result for result in await asyncio.gather(*joins, return_exceptions=True) if isinstance(result, BaseException)]
    if errors:
        # Those that waited for it in vain fail too, and say less.
        raise next((error for error in errors if isinstance(error, EngineTimeoutError)), errors[0])


async def _join(group: WeightGroup, member: Member, registry: EngineRegistry, timeout_s: float) -> None:
    engine = member.engine
    await _leave(engine)
    payload = {
        "master_address": group.master.address,
        "master_port": group.master.port,
        "rank_offset": member.rank_offset,
        "world_size": group.world_size,
        "group_name": group.name,
        "backend": group.master.backend,
    }
    await registry.control(engine, "init_weights_update_group", payload, timeout_s=timeout_s)
    engine.group_name = engine.process_group = group.name


async def _claim_all(group: WeightGroup) -> None:
    """Over a transport without a process group, membership is a matter of the hub's books alone."""
    async with asyncio.TaskGroup() as tasks:
        for engine in group.engines:
            tasks.create_task(_leave(engine))
    for engine in group.engines:
        engine.group_name = group.name


async def _leave(engine: Engine) -> None:
    """Frees an earlier process group. Its trainer may be dead and the call fail, which is harmless: names are unique."""
    engine.group_name = None
    name, engine.process_group = engine.process_group, None
    if name is None:
        return
    try:
        await engine.client.post("destroy_weights_update_group", {"group_name": name}, timeout_s=DESTROY_TIMEOUT_S)
    except EngineError:
        return


async def _listening(master: Master) -> None:
    """Returns when something accepts connections at the trainer's address."""
    while not await is_listening(master.address, master.port):  # noqa: ASYNC110 - nobody would set an event
        await asyncio.sleep(LISTEN_POLL_S)
