"""What the trainer talks to: forms weight groups and takes new weights into their engines while calls wait or go elsewhere.

One update: the group's engines get no new calls → each is told to pause → its weight session opens, when it has ended the step that
it was in → it loads each bucket → the session closes → checksums are compared, if the trainer sent some → generation goes on →
the new version is in force. Every transition has a deadline and is in Redis. A step that fails or runs into its deadline fails
the update:

- no bucket was sent: engines go on with the weights they have;
- a bucket was sent: engines may hold part of a set. They stay paused and out of routing until a later update completes, and
  calls wait at the gate unless other engines can take them. In-flight requests stay in the paused engines and go on then.

Over a transport where each engine loads by itself, and once the last bucket is there, an engine that fails is left out and the
others go on. The first failure answers the trainer at once: engines that are blocked in the same broadcast end when the trainer
leaves the group. An engine that does not answer within the deadline is lost to the registry, its calls begin again elsewhere, and
the next group is formed without it until it answers again. One that received weights and could not load them, twice, while others
could, is quarantined.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

import msgspec
from redis.exceptions import RedisError

from services.inference_hub import weight_check
from services.inference_hub.engine_client import EngineRefusedError
from services.inference_hub.engine_requests import Bucket, check_bucket, load_request
from services.inference_hub.engines import Engine, EngineRegistry
from services.inference_hub.metrics import Metrics
from services.inference_hub.update_state import UpdateState
from services.inference_hub.update_store import TrainerAddress, UpdateRecord, UpdateStore
from services.inference_hub.weight_groups import Master, WeightGroup, form, is_listening, plan_group, wait_formed
from services.inference_hub.weight_update import Outcome, PauseMode, UpdateTimes, WeightUpdate
from shared.errors import EngineError, WeightUpdateError

CLEANUP_TIMEOUT_S: Final = 10.0
MAX_FAILED_LOADS: Final = 2
NOT_RECEIVED: Final = "Failed to receive weights"
"""How SGLang's answer begins when a broadcast broke, which is no fault of the engine that says so."""

Action = Callable[[Engine], Coroutine[None, None, None]]

logger = logging.getLogger(__name__)


class GroupStaleError(WeightUpdateError):
    """The weight group does not have the live engines it should: the trainer has to form a new one."""


class NoEngineError(WeightUpdateError):
    """There is no live engine to push weights to."""


class UnknownUpdateError(WeightUpdateError):
    """The hub has no such update, perhaps because it restarted since."""


class OtherTrainerError(WeightUpdateError):
    """A second trainer, while the first one lives."""


class NotNewerError(WeightUpdateError):
    """A version below the one in force."""


class AlreadyInForceError(WeightUpdateError):
    """The version is in force, and every engine of the group holds it."""


class WeightUpdates:
    """The coordinator. `tasks` owns the joins, engine calls and clean-ups that outlive the request which began them."""

    def __init__(
        self, registry: EngineRegistry, store: UpdateStore, metrics: Metrics, tasks: asyncio.TaskGroup, *, timeout_s: float
    ) -> None:
        self._registry = registry
        self._store = store
        self._metrics = metrics
        self._tasks = tasks
        self._timeout_s = timeout_s
        self._update_began = asyncio.Event()
        self._letting_go: asyncio.Task[None] | None = None
        self._trainer: TrainerAddress | None = None
        self._before_restart: UpdateRecord | None = None
        self.groups: dict[str, WeightGroup] = {}
        self.update: WeightUpdate | None = None

    @property
    def state(self) -> str:
        if self.update is None:
            return self._before_restart.state if self._before_restart else "idle"
        return self.update.progress.state

    async def load(self) -> None:
        """Takes up what an earlier hub left in Redis. An update that it did not end has failed."""
        self._trainer, record = await self._store.load()
        if record is not None and record.state not in (UpdateState.COMMITTED, UpdateState.FAILED):
            failure = f"the hub restarted while it was {record.state}"
            record = msgspec.structs.replace(record, state=UpdateState.FAILED, failure=failure)
            await self._store.save_update(record)
        self._before_restart = record

    async def watch(self) -> None:
        """Fails the update whose deadline passes while no engine is asked for anything. Runs as long as the hub."""
        while True:
            update = self.update
            if update is None or update.progress.is_over:
                self._update_began.clear()
                await self._update_began.wait()
            elif (remaining_s := update.progress.remaining_s(time.monotonic())) > 0:
                await asyncio.sleep(remaining_s)
            elif pending := [call for call in update.calls if not call.done()]:
                # An engine's call has a deadline of its own, and its step knows what the others can do without it.
                await asyncio.wait(pending)
                update.progress.renew(now=time.monotonic())
            else:
                self._fail(
                    update,
                    f"nothing happened for {self._timeout_s:g} s in state {update.progress.state} "
                    "(inference_hub.weight_update_timeout_s)",
                )

    async def form_group(self, epoch: str, master: Master, engine_ids: Sequence[str] | None = None) -> WeightGroup:
        """Starts a group; its engines join in the background. Ends what is unfinished.

        Args: engine_ids: None for all live engines. Raises: OtherTrainerError, NoEngineError.
        """
        await self._require_only_trainer(epoch, master)
        if self.update is not None:
            self._fail(self.update, f"a trainer of epoch {epoch} formed a new weight group")
        # Whom a failed update lost or blames is known when its clean-up is through.
        await self._let_go_settled()
        engines = self._registry.live
        if engine_ids is not None:
            engines = [engine for engine in engines if engine.id in engine_ids]
        if not engines:
            raise NoEngineError(_no_engine(engine_ids))
        for group in self.groups.values():
            if group.formed is not None:
                group.formed.cancel()
        group = plan_group(epoch, master, engines, is_for_all=engine_ids is None)
        self.groups = {other.name: other for other in self.groups.values() if other.is_ready and other.is_current(other.engines)}
        self.groups[group.name] = group
        group.formed = self._tasks.create_task(form(group, self._registry, timeout_s=self._timeout_s))
        return group

    async def wait_group_ready(self, name: str) -> WeightGroup:
        """Raises: GroupStaleError if it is not a current group, EngineError if an engine did not join."""
        group = self._current_group(name)
        await wait_formed(group, timeout_s=self._timeout_s)
        return group

    async def begin(self, group_name: str, version: int, mode: PauseMode, *, is_rolling: bool = False) -> WeightUpdate:
        """Gives the group's engines no more calls and tells them to pause. They end the step they are in, and open their weight
        sessions, while the trainer is told so and announces its first bucket."""
        group = self._current_group(group_name)
        if not group.is_ready or not group.is_current(self._registry.live):
            raise GroupStaleError(
                f"weight group {group_name} must have exactly the live engines it is for, and they have changed since it was "
                "formed; form a new one with POST /weight_groups"
            )
        if self.update is not None and not self.update.progress.is_over:
            raise WeightUpdateError(
                f"one weight update may run at a time, and {self.update.id} is {self.state}; commit it, or DELETE it first"
            )
        self._require_newer(group, version)
        self.update = update = WeightUpdate(group, version, mode, is_rolling=is_rolling, timeout_s=self._timeout_s)
        self._before_restart = None
        self._update_began.set()
        await self._let_go_settled()
        await self._pause(update)
        update.preparing = self._tasks.create_task(self._prepare(update))
        return update

    async def load_bucket(self, update_id: str, bucket: Bucket) -> None:
        """Has every engine receive and load one bucket, which the trainer sends meanwhile."""
        update = self._current_update(update_id)
        check_bucket(update.group, bucket)
        await update.prepared()
        is_first = not update.progress.was_loading
        update.progress.advance(UpdateState.LOADING, now=time.monotonic())
        if is_first:
            update.incomplete_before = frozenset(engine.id for engine in update.engines if engine.is_incomplete)
            saving = asyncio.gather(self._store.save_update(update.record), self._registry.mark_incomplete(update.engines))
            await self._recorded(update, saving)

        async def load(engine: Engine) -> None:
            path, payload = load_request(
                update.group,
                bucket,
                engine.id,
                version=update.version,
                # Requests that kept their KV cache would make the engine refuse; their cache has a namespace of its own instead.
                flushes_cache=update.mode == "retract",
            )
            try:
                await self._post(engine, path, payload)
            except EngineRefusedError as error:
                if bucket.path is None:
                    raise
                raise EngineRefusedError(
                    f"{error}; it must see the trainer's weight_push.directory under the same path; mount it there"
                ) from error

        await self._step(update, load, goes_on_without_failed=not update.group.is_collective)
        update.progress.advance(UpdateState.LOADING, now=time.monotonic())
        update.progress.is_set_complete = update.progress.is_set_complete or bucket.is_last

    async def commit(self, update_id: str, checksums: Mapping[str, str] | None = None) -> Outcome:
        """Closes the sessions, compares checksums, puts the version in force and lets generation go on.

        Args: checksums: the trainer's, by the engine's tensor names; None compares nothing.
        """
        update = self._current_update(update_id)
        update.progress.check(UpdateState.COMMITTED)
        goes_on = self._close_and_resume
        if checksums is not None:
            await self._step(update, partial(self._close_session, update), goes_on_without_failed=True)
            await self._verify(update, checksums)
            update.clock.verified_at = time.perf_counter()
            goes_on = self._resume
        try:
            await self._step(update, partial(goes_on, update), goes_on_without_failed=True)
            update.clock.resumed_at = time.perf_counter()
            update.progress.advance(UpdateState.COMMITTED, now=time.monotonic())
            in_force = self._registry.put_in_force(update.weights, update.engines, is_rolling=update.is_rolling)
            await self._recorded(update, asyncio.gather(self._store.save_update(update.record), in_force))
        finally:
            self._release(update.group.engines)
        times = update.clock.times()
        self._observe(times)
        await self._blame(update)
        urls = tuple(engine.url for engine in update.engines)
        return Outcome(update.version, times, urls, update.left_out, is_verified=checksums is not None)

    async def abandon(self, update_id: str) -> None:
        """The trainer gives the update up."""
        update = self._current_update(update_id)
        update.progress.check(UpdateState.FAILED)
        if letting_go := self._fail(update, "the trainer abandoned it"):
            await asyncio.shield(letting_go)

    async def _require_only_trainer(self, epoch: str, master: Master) -> None:
        known = self._trainer
        is_new = known is None or known.epoch != epoch
        is_elsewhere = known is not None and (known.host, known.port) != (master.address, master.presence_port)
        if known and is_new and is_elsewhere and await is_listening(known.host, known.port):
            raise OtherTrainerError(
                f"a run has one trainer at a time, and that of epoch {known.epoch} lives at {known.host}:{known.port}; stop it "
                f"before that of epoch {epoch} pushes weights"
            )
        trainer = TrainerAddress(epoch, master.address, master.presence_port)
        if trainer != known:
            await self._store.save_trainer(trainer)
            self._trainer = trainer

    def _require_newer(self, group: WeightGroup, version: int) -> None:
        in_force = self._registry.in_force
        if group.epoch != in_force.epoch:
            return
        if version < in_force.version:
            raise NotNewerError(
                f"a weight update must bring a version above {in_force.version}, which this trainer put in force, got {version}; "
                "a trainer that went back to a checkpoint pushes under a new epoch"
            )
        if version == in_force.version and all(engine.weights == in_force and not engine.is_incomplete for engine in group.engines):
            raise AlreadyInForceError(f"version {version} is in force and every engine of weight group {group.name} holds it")

    def _current_group(self, name: str) -> WeightGroup:
        if name not in self.groups:
            raise GroupStaleError(
                f"weight group {name} is not a current one, those are: {', '.join(self.groups) or 'none'}; "
                "form a new one with POST /weight_groups"
            )
        return self.groups[name]

    def _current_update(self, update_id: str) -> WeightUpdate:
        if self.update is None or self.update.id != update_id:
            last = self._before_restart
            because = f", {last.failure}" if last and last.id == update_id and last.failure else ""
            raise UnknownUpdateError(
                f"weight update {update_id} is not the current one{because}; start one with POST /weight_updates"
            )
        return self.update

    async def _pause(self, update: WeightUpdate) -> None:
        update.progress.check(UpdateState.PAUSED)  # It may have been ended while it waited for the clean-up of the last one.
        for engine in update.engines:
            engine.is_updating = True
            engine.has_early_labels = engine.is_overlapping and update.mode == "in_place"
        self._registry.refresh()
        await self._recorded(update, self._store.save_update(update.record))
        update.clock.began_at = time.perf_counter()
        # The reply to pause has to be there before the session opens: sglang #25319.
        await self._step(update, lambda engine: self._post(engine, "pause_generation", {"mode": update.mode}))

    async def _prepare(self, update: WeightUpdate) -> None:
        """The outcome is in the update: its task belongs to nobody who could catch it."""
        with suppress(EngineError, WeightUpdateError, RedisError):
            if update.has_session:
                await self._step(update, self._open_session)
            update.clock.paused_at = time.perf_counter()
            await self._advance(update, UpdateState.PAUSED)

    async def _open_session(self, engine: Engine) -> None:
        try:
            await self._post(engine, "begin_weight_update", {})
        except EngineError as error:
            if "already open" not in str(error):
                raise
            await self._post(engine, "end_weight_update", {})
            await self._post(engine, "begin_weight_update", {})

    async def _close_session(self, update: WeightUpdate, engine: Engine) -> None:
        if update.has_session:
            await self._post(engine, "end_weight_update", {})
        update.clock.loaded_at = update.clock.verified_at = time.perf_counter()

    async def _resume(self, update: WeightUpdate, engine: Engine) -> None:
        await self._continue(engine)

    async def _close_and_resume(self, update: WeightUpdate, engine: Engine) -> None:
        await self._close_session(update, engine)
        await self._continue(engine)

    async def _verify(self, update: WeightUpdate, expected: Mapping[str, str]) -> None:
        """Leaves out engines that do not hold what the trainer sent."""
        found: dict[str, list[weight_check.Checksums]] = {}

        async def check(engine: Engine) -> None:
            found[engine.id] = await self._checksums(engine)

        await self._step(update, check, goes_on_without_failed=True)
        for engine_id, problem in weight_check.mismatches(found, expected or None).items():
            engine = next(engine for engine in update.engines if engine.id == engine_id)
            self._metrics.checksum_mismatches.inc()
            update.leave_out(engine, problem)
            update.refusers[engine.id] = problem
        self._require_some(update)

    async def _checksums(self, engine: Engine) -> list[weight_check.Checksums]:
        body = await self._registry.control(engine, "weights_checker", {"action": "checksum"}, timeout_s=self._timeout_s)
        return weight_check.parse_check(body, engine.url)

    async def _step(self, update: WeightUpdate, action: Action, *, goes_on_without_failed: bool = False) -> None:
        """`action` on all engines at once.

        Unless it goes on without engines that failed, the first failure fails the update and is raised at once; the other calls
        end in the clean-up. Raises: EngineError, WeightUpdateError if the update was ended meanwhile: its engines were let go.
        """
        update.progress.check(UpdateState.FAILED)

        async def outcome(engine: Engine) -> tuple[Engine, EngineError | None]:
            try:
                await action(engine)
            except EngineError as error:
                if isinstance(error, EngineRefusedError) and NOT_RECEIVED not in str(error):
                    update.refusers[engine.id] = str(error)
                return engine, error
            return engine, None

        update.calls = [self._tasks.create_task(outcome(engine)) for engine in update.engines]
        for call in asyncio.as_completed(update.calls):
            engine, error = await call
            if error is None:
                continue
            if not goes_on_without_failed:
                self._fail(update, str(error))
                raise EngineError(str(error)) from error
            update.leave_out(engine, str(error))
        self._require_some(update)

    def _require_some(self, update: WeightUpdate) -> None:
        """Raises: EngineError if no engine is left, and fails the update."""
        if not update.engines:
            problem = "; ".join(update.left_out.values())
            self._fail(update, problem)
            raise EngineError(problem)

    async def _post(self, engine: Engine, path: str, payload: Mapping[str, object]) -> None:
        await self._registry.control(engine, path, payload, timeout_s=self._timeout_s)

    async def _advance(self, update: WeightUpdate, state: UpdateState) -> None:
        is_change = update.progress.state is not state
        update.progress.advance(state, now=time.monotonic())
        if is_change:
            await self._recorded(update, self._store.save_update(update.record))

    async def _recorded(self, update: WeightUpdate, saving: Awaitable[object]) -> None:
        """An update that Redis does not know of must not touch engines. Raises: RedisError."""
        try:
            await saving
        except RedisError as error:
            self._fail(update, f"Redis did not record it: {error}")
            raise

    def _fail(self, update: WeightUpdate, reason: str) -> asyncio.Task[None] | None:
        """Ends the update at once, if it is not over; the engines follow in the task returned."""
        if not update.progress.fail(reason, now=time.monotonic()):
            return None
        self._metrics.weight_updates.labels(UpdateState.FAILED).inc()
        logger.warning("weight update %s of version %d failed: %s", update.id, update.version, reason)
        self._letting_go = self._tasks.create_task(self._let_go(update))
        return self._letting_go

    async def _let_go(self, update: WeightUpdate) -> None:
        """Engines without any of a failed update's weights go on; the others stay paused, in no session and out of routing."""
        await update.prepared()
        if update.calls:
            await asyncio.wait(update.calls)
        engines = update.group.engines
        if update.has_session:
            await self._on_each(engines, self._abandon_session)
        if update.progress.was_loading:
            untouched = [engine for engine in engines if update.is_untouched(engine)]
            await self._noted(update, self._registry.mark_untouched(untouched))
        else:
            # One that an earlier update left with part of a set has calls that must not go on with it.
            untouched = [engine for engine in engines if not engine.is_incomplete]
        await self._on_each(untouched, self._continue)
        self._release(engines)
        await self._blame(update)
        await self._noted(update, self._store.save_update(update.record))

    async def _noted(self, update: WeightUpdate, saving: Awaitable[object]) -> None:
        """A clean-up goes on without Redis: a hub that restarts fails the update by itself, and believes engines incomplete."""
        try:
            await saving
        except RedisError as error:
            logger.warning("the failure of weight update %s is not in Redis: %s", update.id, error)

    async def _let_go_settled(self) -> None:
        """One update's clean-up must not undo the next one's pause."""
        if self._letting_go is not None:
            await asyncio.shield(self._letting_go)

    async def _blame(self, update: WeightUpdate) -> None:
        """Counts failures of engines whose peers had none; too many in a row, and the engine is quarantined."""
        if len(update.refusers) == len(update.group.members) > 1:
            return
        for engine in update.group.engines:
            if problem := update.refusers.get(engine.id):
                engine.num_failed_loads += 1
                engine.problem = problem
                if engine.num_failed_loads >= MAX_FAILED_LOADS and len(self._registry.live) > 1:
                    because = f"it failed {engine.num_failed_loads} weight updates in a row: {problem}"
                    await self._registry.quarantine(engine, because)

    def _release(self, engines: Sequence[Engine]) -> None:
        for engine in engines:
            engine.is_updating = False
        self._registry.refresh()

    async def _abandon_session(self, engine: Engine) -> None:
        with suppress(EngineError):
            await engine.client.post("end_weight_update", {}, timeout_s=min(CLEANUP_TIMEOUT_S, self._timeout_s))

    async def _continue(self, engine: Engine) -> None:
        """Generation goes on. An engine that does not answer is a matter for its probes."""
        try:
            await engine.client.post("continue_generation", {}, timeout_s=min(CLEANUP_TIMEOUT_S, self._timeout_s))
        except EngineError as error:
            self._registry.suspect(engine, str(error))

    async def _on_each(self, engines: Sequence[Engine], action: Action) -> None:
        async with asyncio.TaskGroup() as tasks:
            for engine in engines:
                tasks.create_task(action(engine))

    def _observe(self, times: UpdateTimes) -> None:
        self._metrics.weight_updates.labels(UpdateState.COMMITTED).inc()
        for step in ("pause", "pause_call", "load", "verify", "resume"):
            self._metrics.weight_update_seconds.labels(step).observe(getattr(times, f"{step}_s"))


def _no_engine(engine_ids: Sequence[str] | None) -> str:
    if engine_ids is None:
        return "a weight group needs at least one live engine, got none; register one with POST /engines"
    return f"a weight group needs at least one live engine, and none of {', '.join(engine_ids) or 'no ids'} is; see GET /engines"
