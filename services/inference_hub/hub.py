"""The hub's parts, and their life: opened from the configuration, watched while it serves, closed in order."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from services.inference_hub.access import Access, EngineHosts
from services.inference_hub.discovery import Discovery
from services.inference_hub.engines import Engine, EngineRegistry
from services.inference_hub.gate import Gate
from services.inference_hub.generate import GenerateEndpoint
from services.inference_hub.metrics import Metrics
from services.inference_hub.probes import Prober
from services.inference_hub.update_store import UpdateStore
from services.inference_hub.waiting import WaitingCalls
from services.inference_hub.weight_updates import WeightUpdates
from shared.configuration import Configuration
from shared.errors import EngineError, HeadraceError
from shared.hub_tokens import required_tokens
from shared.keys import Keys
from shared.loop_lag import watch_loop_lag

REDIS_RETRY_S: Final = 1.0

logger = logging.getLogger(__name__)


class AlreadyRegisteredError(HeadraceError):
    """An engine at this address is registered."""


class UnusableEngineError(HeadraceError):
    """What is at this address is no engine for this run, or nothing is there."""


class UnknownEngineError(HeadraceError):
    """No engine is registered under this id."""


class OtherRunError(HeadraceError):
    """A trainer of another run."""


class EngineBusyError(HeadraceError):
    """The engine is part of a weight update that runs."""


class Hub:
    """Everything the hub owns. Made by `open_hub`, whose task group runs its background work."""

    def __init__(self, configuration: Configuration, redis: Redis, tasks: asyncio.TaskGroup) -> None:
        section = configuration.inference_hub
        self._tasks = tasks
        self.run_id = configuration.run.id
        self._drain_timeout_s = section.generate_timeout_s
        self.access = Access(required_tokens())
        self._hosts = EngineHosts(section.engine_hosts)
        self.gate = Gate()
        keys = Keys(configuration.run.id)
        self.registry = EngineRegistry(redis, keys, self.gate)
        self.waiting: WaitingCalls[Engine] = WaitingCalls()
        self.metrics = Metrics(self.registry, self.gate, self.waiting)
        self.updates = WeightUpdates(
            self.registry, UpdateStore(redis, keys), self.metrics, tasks, timeout_s=section.weight_update_timeout_s
        )
        self.prober = Prober(
            self.registry,
            self.metrics,
            interval_s=section.probe_interval_s,
            hang_timeout_s=section.hang_timeout_s,
            engine_version=section.engine_version,
            model_type=model_type_in(Path(configuration.run.model_path)),
        )
        self._discovery = Discovery(
            configuration.engines.discovery,
            interval_s=section.probe_interval_s,
            engines=self.registry.by_id.values,
            add=partial(self.expect, is_discovered=True),
            remove=self._forget,
        )
        self.generate = GenerateEndpoint(
            self.registry,
            self.gate,
            self.waiting,
            self.metrics,
            self.access,
            tasks,
            timeout_s=section.generate_timeout_s,
            max_attempts=section.max_attempts,
            max_waiting_calls=section.max_waiting_calls,
            max_body_bytes=section.max_body_bytes,
            segment_tokens=section.segment_tokens,
            strategy_name=section.routing,
        )

    @property
    def num_held_calls(self) -> int:
        """Calls that wait because no engine may take any."""
        return 0 if self.gate.is_open else len(self.waiting)

    async def register(self, url: str) -> Engine:
        """The engine at `url`, verified. Raises: AlreadyRegisteredError, HostNotAllowedError, UnusableEngineError."""
        self._require_new(self.registry.find(url))
        self._hosts.require(url)
        engine = self.registry.new_engine(url)
        try:
            await self.prober.verify(engine)
        except EngineError as error:
            await engine.client.close()
            raise UnusableEngineError(str(error)) from error
        kept = await self._add(engine)
        self._require_new(None if kept is engine else kept)
        return engine

    def _require_new(self, known: Engine | None) -> None:
        if known is not None:
            raise AlreadyRegisteredError(
                f"an engine may be registered once, and engine {known.id} is at this address, {self.registry.state_of(known)}; "
                f"DELETE /engines/{known.id} first to register it anew"
            )

    async def expect(self, url: str, *, is_discovered: bool = False) -> None:
        """Registers an engine that may not be up yet: it joins when it is."""
        if self.registry.find(url) is None:
            await self._add(self.registry.new_engine(url, is_discovered=is_discovered))

    async def _add(self, engine: Engine) -> Engine:
        """The engine at this address, which is watched from now on: this one, or one that was added meanwhile."""
        kept = await self.registry.add(engine)
        if kept is engine:
            self._tasks.create_task(self.prober.watch(engine))
        return kept

    def require_run(self, run_id: str | None) -> None:
        """Raises: OtherRunError if a trainer gives another run's id: its weights would replace those that this run's agents use."""
        if run_id not in (None, self.run_id):
            raise OtherRunError(
                f"a trainer must be of the hub's run, {self.run_id!r}, got one of {run_id!r}; give hub, agents and trainer the "
                "same run.id in their run files, and restart those that have another one"
            )

    async def quarantine(self, engine_id: str, problem: str) -> Engine:
        """Gives an engine no weights and no calls until it is lost, as in a restart.

        Raises: UnknownEngineError; EngineBusyError.
        """
        engine = self._idle_member(engine_id)
        await self.registry.quarantine(engine, problem)
        return engine

    async def remove(self, engine_id: str, *, is_forced: bool) -> Engine:
        """Takes an engine out of routing; it is forgotten once it is idle, or at once, and then its calls begin again elsewhere."""
        engine = self._drain(engine_id)
        if is_forced and not engine.is_gone:
            await self._forget(engine)
        return engine

    def _drain(self, engine_id: str) -> Engine:
        engine = self._idle_member(engine_id)
        if not engine.is_draining:
            engine.is_draining = True
            self.registry.refresh()
            self._tasks.create_task(self._forget_when_idle(engine))
        return engine

    def _idle_member(self, engine_id: str) -> Engine:
        """One that is in no weight update."""
        engine = self.registry.by_id.get(engine_id)
        if engine is None:
            raise UnknownEngineError(f"engine {engine_id} must be registered, and is not; GET /engines lists those that are")
        if engine.is_updating:
            raise EngineBusyError(f"engine {engine_id} takes part in a weight update; try again when the update has ended")
        return engine

    def watch_all(self) -> None:
        """Starts the background work: probes, discovery, the deadline of weight updates, and the measure of the loop's lag."""
        self._tasks.create_task(watch_loop_lag(self.metrics.loop_lag.observe))
        self._tasks.create_task(self.generate.watch())
        self._tasks.create_task(self.updates.watch())
        self._tasks.create_task(self._discovery.watch())
        for engine in self.registry.by_id.values():
            self._tasks.create_task(self.prober.watch(engine))

    async def _forget(self, engine: Engine) -> None:
        await self.registry.remove(engine)
        self.metrics.by_engine.forget(engine.id)

    async def _forget_when_idle(self, engine: Engine) -> None:
        try:
            async with asyncio.timeout(self._drain_timeout_s):
                await engine.idle.wait()
        except TimeoutError:
            logger.warning("engine=%s was not idle within %g s; its calls begin again elsewhere", engine.id, self._drain_timeout_s)
        while not engine.is_gone:
            try:
                await self._forget(engine)
            except RedisError as error:
                logger.warning("engine=%s cannot be forgotten yet: %s", engine.id, error)
                await asyncio.sleep(REDIS_RETRY_S)


class _ModelConfiguration(msgspec.Struct):
    model_type: str | None = None


def model_type_in(directory: Path) -> str | None:
    """Of the model in a Hugging Face directory; None where there is none to read, as in a hub's own container."""
    try:
        return msgspec.json.decode((directory / "config.json").read_bytes(), type=_ModelConfiguration).model_type
    except (OSError, msgspec.DecodeError):
        return None


class _Stopped(Exception):  # noqa: N818 - ends the task group, which nobody sees
    """The hub's body is through."""


async def _stop() -> None:
    raise _Stopped


@asynccontextmanager
async def open_hub(configuration: Configuration, redis: Redis) -> AsyncIterator[Hub]:
    """A hub that knows the engines of the configuration and those an earlier hub of this run left in Redis."""
    hub = None
    try:
        async with asyncio.TaskGroup() as tasks:
            hub = Hub(configuration, redis, tasks)
            await hub.registry.load()
            await hub.updates.load()
            hub.watch_all()
            for url in configuration.engines.urls:
                await hub.expect(url)
            yield hub
            tasks.create_task(_stop())
    except* _Stopped:
        pass
    finally:
        if hub is not None:
            await hub.registry.close()
