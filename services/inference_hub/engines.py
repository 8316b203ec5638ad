"""The registry of engines: which exist, what state each is in, and which weights are in force.

    JOINING ──verified──► SYNCING ──holds the weights in force──► READY ──removed──► DRAINING ──idle──► GONE
       ▲                     ▲                                      │
       └── answers again ── SUSPECT ◄── a call or a probe failed ───┤
                                    ◄── no progress with its calls ─┘

SYNCING ──does not take weights, again and again──► QUARANTINED ──restarted──► JOINING

The state is derived from what is known about an engine; `probes` and `weight_updates` change what is known and call `refresh`.
Registrations and the weights in force are in Redis, so a hub that restarts goes on where it was.
"""

import asyncio
import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, cast

import msgspec
from redis.asyncio import Redis

from services.inference_hub.engine_client import EngineClient, EngineRefusedError, EngineTimeoutError
from services.inference_hub.gate import Gate, Hold
from services.inference_hub.limits import CallLimit
from services.inference_hub.progress import Progress
from services.inference_hub.request_limits import RequestLimits, common_limits
from services.inference_hub.usage import Limits, Usage
from shared.errors import EngineError
from shared.keys import Keys

INITIAL_EPOCH: Final = "initial"

logger = logging.getLogger(__name__)


class EngineState(StrEnum):
    JOINING = "joining"
    """Registered; its address, version and parallelism are not verified yet."""
    SYNCING = "syncing"
    """Alive, without the weights in force: the next weight update brings them."""
    READY = "ready"
    """The only state in which it gets calls."""
    SUSPECT = "suspect"
    """It failed to answer; the next probe decides."""
    DRAINING = "draining"
    """Removed; it finishes the calls it has."""
    QUARANTINED = "quarantined"
    """It failed to take weights that others took: no calls and no more weights until it was restarted."""
    GONE = "gone"


class WeightsInForce(msgspec.Struct, frozen=True):
    """The policy version that calls are answered with, and the trainer's epoch that pushed it."""

    version: int = 0
    epoch: str = INITIAL_EPOCH


class Registration(msgspec.Struct, frozen=True):
    """What Redis holds about an engine, under its URL."""

    id: str
    url: str
    synced_epoch: str = INITIAL_EPOCH
    """The epoch whose push it last took completely."""
    is_incomplete: bool = False
    """It may hold part of a set of weights."""
    is_discovered: bool = False
    """It was found by name, so it is forgotten when it is gone."""


@dataclass(eq=False)
class Engine:
    """What is known about one engine."""

    id: str
    url: str
    client: EngineClient
    synced_epoch: str = INITIAL_EPOCH
    is_incomplete: bool = False
    is_discovered: bool = False
    is_verified: bool = False
    is_suspect: bool = False
    is_draining: bool = False
    is_gone: bool = False
    is_updating: bool = False
    """A weight update holds it paused."""
    num_failed_loads: int = 0
    """Weight updates in a row that failed on it alone."""
    quarantined_because: str | None = None
    version: int | None = None
    """The policy version in its label; None if unknown."""
    tensor_parallel_size: int = 1
    model_path: str = ""
    """The directory of the model that it was started with, on its own machine."""
    is_overlapping: bool = False
    """Its scheduler prepares the next step while the last one's tokens are not processed yet."""
    has_early_labels: bool = False
    """It was paused in place while overlapping: see `answer.date_back`."""
    group_name: str | None = None
    """The weight group it belongs to."""
    process_group: str | None = None
    """The process group it has joined for it, if the transport needs one."""
    problem: str | None = None
    """Why it is not ready, as a sentence."""
    outstanding_tokens: int = 0
    """Of the calls it is answering: prompts, and what they may still sample."""
    outstanding_prompt_tokens: int = 0
    num_outstanding_calls: int = 0
    busy_period: int = 0
    """Counts its times with calls."""
    progress: Progress = field(default_factory=Progress)
    limit: CallLimit = field(default_factory=CallLimit)
    """How many calls it gets at once."""
    limits: Limits = field(default_factory=Limits)
    """What it can run at the same time; more waits in it."""
    request_limits: RequestLimits = field(default_factory=RequestLimits)
    has_told_limits: bool = False
    """`request_limits` are all that it says of itself."""
    usage: Usage = field(default_factory=Usage)
    num_failed_probes: int = 0
    logged_state: EngineState | None = None
    has_answered: bool = False
    """It answered a call since the last probe."""
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    """Set to probe it at once."""
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while it answers no call."""

    def __post_init__(self) -> None:
        self.idle.set()

    @property
    def is_live(self) -> bool:
        """It takes part in weight updates."""
        return self.is_verified and not self.is_draining and not self.is_gone and not self.quarantined_because

    @property
    def cache_tokens(self) -> int:
        """Size of its KV cache; 0 if it does not say."""
        return self.limits.tokens or 0

    def begin_call(self, *, prompt_tokens: int, cost_tokens: int) -> None:
        if not self.num_outstanding_calls:
            self.busy_period += 1
        self.num_outstanding_calls += 1
        self.outstanding_prompt_tokens += prompt_tokens
        self.outstanding_tokens += cost_tokens
        self._note_usage()
        self.idle.clear()

    def end_call(self, *, prompt_tokens: int, cost_tokens: int) -> None:
        self.num_outstanding_calls -= 1
        self.outstanding_prompt_tokens -= prompt_tokens
        self.outstanding_tokens -= cost_tokens
        self._note_usage()
        if not self.num_outstanding_calls:
            self.idle.set()

    def _note_usage(self) -> None:
        num_calls, num_tokens = self.num_outstanding_calls, self.outstanding_tokens
        self.usage.calls(num_calls, self.limits.share_used(num_calls, num_tokens))

    @property
    def weights(self) -> WeightsInForce:
        """What it answers with, as a name for prefix caches."""
        return WeightsInForce(0 if self.version is None else self.version, self.synced_epoch)

    def state(self, in_force: WeightsInForce, previous: WeightsInForce | None = None) -> EngineState:
        """Args: previous: weights that calls are answered with as well, while a rolling update goes on."""
        if self.is_gone:
            return EngineState.GONE
        if self.is_draining:
            return EngineState.DRAINING
        if self.is_suspect:
            return EngineState.SUSPECT
        if not self.is_verified:
            return EngineState.JOINING
        if self.quarantined_because:
            return EngineState.QUARANTINED
        is_ready = self.holds(in_force) or (previous is not None and self.holds(previous))
        return EngineState.READY if is_ready else EngineState.SYNCING

    def holds(self, in_force: WeightsInForce) -> bool:
        # A label alone does not identify weights: a lineage that resumed from a checkpoint uses the same versions again.
        # Version 0 does, because it is the model every engine starts from.
        is_same_lineage = in_force.version == 0 or self.synced_epoch == in_force.epoch
        return not self.is_incomplete and self.version == in_force.version and is_same_lineage

    @property
    def registration(self) -> Registration:
        return Registration(self.id, self.url, self.synced_epoch, self.is_incomplete, self.is_discovered)


def engine_id_of(url: str) -> str:
    """The same id for the same address, so that registering twice is harmless."""
    return hashlib.sha256(url.encode()).hexdigest()[:12]


def normal_url(url: str) -> str:
    return url.strip().rstrip("/")


class EngineRegistry:
    """All engines by id. `routable` is what routing chooses from; the gate is held while it is empty."""

    def __init__(self, redis: Redis, keys: Keys, gate: Gate) -> None:
        self._redis = redis
        self._keys = keys
        self._gate = gate
        self.in_force = WeightsInForce()
        self.previous: WeightsInForce | None = None
        """Also answered with, until a rolling update has reached every engine."""
        self.by_id: dict[str, Engine] = {}
        self.routable: tuple[Engine, ...] = ()
        self.request_limits = RequestLimits()
        """Of every live engine."""
        self.on_change: Callable[[], object] = lambda: None
        """Called when `routable` has changed."""
        self.refresh()

    @property
    def live(self) -> list[Engine]:
        return [engine for engine in self.by_id.values() if engine.is_live]

    @property
    def wanting(self) -> list[Engine]:
        """Live engines without the weights in force, which no update under way brings them."""
        return [engine for engine in self.live if not engine.is_updating and self.state_of(engine) is EngineState.SYNCING]

    def state_of(self, engine: Engine) -> EngineState:
        return engine.state(self.in_force, self.previous)

    def refresh(self) -> None:
        """Call after anything that can change an engine's state."""
        self._log_changes()
        self.request_limits = common_limits(self.live)
        before = self.routable
        ready = [engine for engine in self.by_id.values() if self.state_of(engine) is EngineState.READY]
        self.routable = tuple(engine for engine in ready if not engine.is_updating)
        for engine in self.by_id.values():
            engine.usage.readiness(engine in ready)
        is_updating = any(engine.is_updating for engine in self.by_id.values())
        for reason, is_reason in ((Hold.WEIGHT_UPDATE, is_updating), (Hold.NO_ENGINE, not is_updating)):
            if is_reason and not self.routable:
                self._gate.hold(reason)
            else:
                self._gate.release(reason)
        if self.routable != before:
            self.on_change()

    def _log_changes(self) -> None:
        """One line for each engine whose state changed. An address may hold a secret, so engines are named by their ids."""
        for engine in self.by_id.values():
            state = self.state_of(engine)
            if state is not engine.logged_state:
                logger.info("engine=%s state=%s was=%s version=%s", engine.id, state, engine.logged_state or "new", engine.version)
                engine.logged_state = state

    async def load(self) -> None:
        """Takes up what an earlier hub of this run left in Redis."""
        weights = cast(dict[bytes, bytes], await self._redis.hgetall(self._keys.weights))
        if b"version" in weights:
            self.in_force = WeightsInForce(int(weights[b"version"]), weights[b"epoch"].decode())
        registrations = cast(dict[bytes, bytes], await self._redis.hgetall(self._keys.engines))
        for encoded in registrations.values():
            self._add(msgspec.json.decode(encoded, type=Registration))
        self.refresh()

    def find(self, url: str) -> Engine | None:
        return self.by_id.get(engine_id_of(normal_url(url)))

    def new_engine(self, url: str, *, is_discovered: bool = False) -> Engine:
        """An engine that is not registered yet, to be verified first."""
        url = normal_url(url)
        return Engine(engine_id_of(url), url, EngineClient(url), is_discovered=is_discovered)

    async def add(self, engine: Engine) -> Engine:
        """The engine that is registered: `engine`, or one that another caller added meanwhile, and then `engine` is closed."""
        await self._redis.hset(self._keys.engines, engine.url, msgspec.json.encode(engine.registration))
        kept = self.by_id.setdefault(engine.id, engine)
        if kept is not engine:
            await engine.client.close()
        self.refresh()
        return kept

    async def remove(self, engine: Engine) -> None:
        """Forgets an engine and cuts what it still answers; those calls begin again elsewhere."""
        await self._redis.hdel(self._keys.engines, engine.url)
        engine.is_gone = True
        engine.wake.set()
        self._log_changes()
        self.by_id.pop(engine.id, None)
        self.refresh()
        await engine.client.close()

    async def lose(self, engine: Engine, problem: str) -> None:
        """An engine that does not answer any more: its calls begin again elsewhere, and it has to be verified anew."""
        engine.is_suspect = True
        engine.is_verified = False
        engine.quarantined_because = None
        engine.num_failed_loads = 0
        # Its process group stays known: another engine may hang in a broadcast until this one, when it is back, leaves it.
        engine.group_name = None
        engine.problem = problem
        self.refresh()
        await engine.client.close()

    async def quarantine(self, engine: Engine, problem: str) -> None:
        """An engine that cannot take weights which others take. It comes back when it is lost and found again, as in a restart.

        The calls in it begin again elsewhere."""
        engine.quarantined_because = problem
        self.refresh()
        await engine.client.close()

    async def control(self, engine: Engine, path: str, payload: Mapping[str, object], *, timeout_s: float) -> bytes:
        """A control call that the engine has to answer, or is lost: one whose scheduler hangs still answers `/model_info`.

        Raises: EngineError.
        """
        try:
            return await engine.client.post(path, payload, timeout_s=timeout_s)
        except EngineTimeoutError as error:
            await self.lose(engine, str(error))
            raise
        except EngineRefusedError:
            raise
        except EngineError as error:
            self.suspect(engine, str(error))
            raise

    def suspect(self, engine: Engine, problem: str) -> None:
        """A call failed on it: no new calls until a probe, which follows at once."""
        engine.is_suspect = True
        if engine.is_verified:
            engine.problem = problem  # One that is lost has a reason for it, of which this is a consequence.
        engine.wake.set()
        self.refresh()

    async def mark_incomplete(self, engines: Iterable[Engine]) -> None:
        """Before the first weights are sent: from here on only a complete set makes these engines usable again."""
        engines = list(engines)
        for engine in engines:
            engine.is_incomplete = True
        self.refresh()
        await self._save(engines)

    async def mark_untouched(self, engines: Iterable[Engine]) -> None:
        """None of the weights that were sent reached these engines: they hold what they held."""
        engines = list(engines)
        for engine in engines:
            engine.is_incomplete = False
        self.refresh()
        await self._save(engines)

    async def put_in_force(self, in_force: WeightsInForce, engines: Iterable[Engine], *, is_rolling: bool = False) -> None:
        """These engines hold a complete set of new weights, which calls are answered with from now on.

        Args: is_rolling: the others go on with the weights that were in force until now, until it is their turn.
        """
        engines = list(engines)
        if not is_rolling:
            self.previous = None
        elif in_force != self.in_force:
            self.previous = self.in_force
        self.in_force = in_force
        for engine in engines:
            engine.is_incomplete = False
            engine.num_failed_loads = 0
            engine.version = in_force.version
            engine.synced_epoch = in_force.epoch
        if self.previous is not None and not any(engine.holds(self.previous) for engine in self.live):
            self.previous = None
        self.refresh()
        await self._save(engines)

    async def close(self) -> None:
        for engine in self.by_id.values():
            await engine.client.close()

    async def _save(self, engines: list[Engine]) -> None:
        async with self._redis.pipeline(transaction=True) as pipeline:
            pipeline.hset(self._keys.weights, mapping={"version": self.in_force.version, "epoch": self.in_force.epoch})
            registrations: dict[Any, Any] = {
                engine.url: msgspec.json.encode(engine.registration) for engine in engines if not engine.is_gone
            }
            if registrations:
                pipeline.hset(self._keys.engines, mapping=registrations)
            await pipeline.execute()

    def _add(self, registration: Registration) -> None:
        self.by_id[registration.id] = Engine(
            registration.id,
            registration.url,
            EngineClient(registration.url),
            synced_epoch=registration.synced_epoch,
            is_incomplete=registration.is_incomplete,
            is_discovered=registration.is_discovered,
        )
