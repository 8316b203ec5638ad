"""What the trainer talks to: forms weight groups and takes new weights into all engines while calls wait at the gate.

One update: hold new calls → pause every engine → open its weight session → load each bucket → close the session → the new
version is in force → continue generation → release the calls. A step that fails or runs into its deadline fails the update:

- no bucket was sent: engines go on with the weights they have;
- a bucket was sent: engines may hold part of a set. They stay paused and out of routing until a later update completes, and
  calls wait at the gate. In-flight requests stay in the paused engines and go on then.

A trainer that dies in a gloo broadcast closes its connections, and the engines answer at once that they received nothing. If
its machine vanishes they hang instead, for as long as torch waits. Each control call has a deadline; an engine that passes one
is lost to the registry, its calls begin again elsewhere, and the next group is formed without it until it answers again.
"""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from services.inference_hub.engines import Engine, EngineRegistry, WeightsInForce
from services.inference_hub.gate import Gate, Hold
from services.inference_hub.metrics import Metrics
from services.inference_hub.update_state import UpdateProgress, UpdateState
from services.inference_hub.weight_groups import Master, WeightGroup, form, plan_group, wait_formed
from shared.errors import EngineError, WeightUpdateError

PauseMode = Literal["in_place", "retract"]

CLEANUP_TIMEOUT_S: Final = 10.0


class GroupStaleError(WeightUpdateError):
    """The weight group does not have exactly the live engines: the trainer has to form a new one."""


class NoEngineError(WeightUpdateError):
    """There is no live engine to push weights to."""


class UnknownUpdateError(WeightUpdateError):
    """The hub has no such update, perhaps because it restarted since."""


@dataclass(frozen=True)
class Bucket:
    """The tensors of one broadcast, in its order."""

    names: Sequence[str]
    dtypes: Sequence[str]
    shapes: Sequence[Sequence[int]]
    load_format: str | None
    is_last: bool


@dataclass(frozen=True)
class UpdateTimes:
    """What a committed update took, in seconds."""

    version: int
    pause_s: float
    """Without generation: from the first pause sent to the last continue answered."""
    pause_call_s: float
    load_s: float
    """From the open session to the closed one; the trainer's broadcasts are in it."""
    resume_s: float


class WeightUpdate:
    """One update: its progress, its engines and its clock readings."""

    def __init__(self, group: WeightGroup, version: int, mode: PauseMode, *, timeout_s: float) -> None:
        self.id = uuid.uuid4().hex
        self.group = group
        self.engines = [member.engine for member in group.members]
        self.version = version
        self.mode = mode
        self.progress = UpdateProgress(self.id, timeout_s=timeout_s, now=time.monotonic())
        self.started_at = time.perf_counter()
        self.paused_at = self.started_at
        self.in_session_at = self.started_at


class WeightUpdates:
    """The coordinator. `tasks` owns the joins and clean-ups that outlive the request which began them."""

    def __init__(
        self, registry: EngineRegistry, gate: Gate, metrics: Metrics, tasks: asyncio.TaskGroup, *, timeout_s: float
    ) -> None:
        self._registry = registry
        self._gate = gate
        self._metrics = metrics
        self._tasks = tasks
        self._timeout_s = timeout_s
        self._update_began = asyncio.Event()
        self._settling = asyncio.Lock()
        """Held while engines are being paused or let go, so that one update's clean-up cannot undo the next one's pause."""
        self.group: WeightGroup | None = None
        self.update: WeightUpdate | None = None

    @property
    def state(self) -> str:
        return self.update.progress.state if self.update else "idle"

    async def watch(self) -> None:
        """Fails the update whose deadline passes. Runs as long as the hub."""
        while True:
            update = self.update
            if update is None or update.progress.is_over:
                self._update_began.clear()
                await self._update_began.wait()
            elif (remaining_s := update.progress.remaining_s(time.monotonic())) > 0:
                await asyncio.sleep(remaining_s)
            else:
                self._fail(
                    update,
                    f"nothing happened for {self._timeout_s:g} s in state {update.progress.state} "
                    "(inference_hub.weight_update_timeout_s)",
                )

    async def form_group(self, epoch: str, master: Master) -> WeightGroup:
        """Starts a group of all live engines; they join in the background. Ends what an earlier epoch left unfinished."""
        if self.update is not None:
            self._fail(self.update, f"a trainer of epoch {epoch} formed a new weight group")
        if self.group is not None and self.group.formed is not None:
            self.group.formed.cancel()
        if not (engines := self._registry.live):
            raise NoEngineError("a weight group needs at least one live engine, got none; register one with POST /engines")
        self.group = plan_group(epoch, master, engines)
        self.group.formed = self._tasks.create_task(form(self.group, self._registry, timeout_s=self._timeout_s))
        return self.group

    async def wait_group_ready(self, name: str) -> WeightGroup:
        """Raises: GroupStaleError if it is not the current group, EngineError if an engine did not join."""
        group = self._current_group(name)
        await wait_formed(group, timeout_s=self._timeout_s)
        return group

    async def begin(self, group_name: str, version: int, mode: PauseMode) -> WeightUpdate:
        """Holds calls, pauses every live engine and opens its weight session."""
        group = self._current_group(group_name)
        if not group.is_ready or not group.has_exactly(self._registry.live):
            raise GroupStaleError(
                f"weight group {group_name} must have exactly the live engines, and they have changed since it was formed; "
                "form a new one with POST /weight_groups"
            )
        if self.update is not None and not self.update.progress.is_over:
            raise WeightUpdateError(
                f"one weight update may run at a time, and {self.update.id} is {self.state}; commit it, or DELETE it first"
            )
        self.update = update = WeightUpdate(group, version, mode, timeout_s=self._timeout_s)
        self._update_began.set()
        async with self._settling:
            await self._prepare(update)
        return update

    async def load(self, update_id: str, bucket: Bucket) -> None:
        """Has every engine receive and load one bucket, which the trainer broadcasts meanwhile."""
        update = self._current_update(update_id)
        is_first = not update.progress.was_loading
        update.progress.advance(UpdateState.LOADING, now=time.monotonic())
        if is_first:
            await self._registry.mark_incomplete(update.engines)
        payload = {
            "names": bucket.names,
            "dtypes": bucket.dtypes,
            "shapes": bucket.shapes,
            "load_format": bucket.load_format,
            "group_name": update.group.name,
            "weight_version": str(update.version) if bucket.is_last else None,
            # Requests that kept their KV cache would make the engine refuse; their cache has a namespace of its own instead.
            "flush_cache": bucket.is_last and update.mode == "retract",
        }
        await self._step(update, lambda engine: self._post(engine, "update_weights_from_distributed", payload))
        update.progress.advance(UpdateState.LOADING, now=time.monotonic())
        update.progress.is_set_complete = update.progress.is_set_complete or bucket.is_last

    async def commit(self, update_id: str) -> UpdateTimes:
        """Closes the sessions, puts the version in force and lets generation go on."""
        update = self._current_update(update_id)
        update.progress.check(UpdateState.COMMITTED)
        await self._step(update, lambda engine: self._post(engine, "end_weight_update", {}))
        loaded_at = time.perf_counter()
        update.progress.advance(UpdateState.COMMITTED, now=time.monotonic())
        try:
            await self._registry.put_in_force(WeightsInForce(update.version, update.group.epoch), update.engines)
        finally:
            async with self._settling:
                await self._resume(update.engines)
        ended_at = time.perf_counter()
        times = UpdateTimes(
            version=update.version,
            pause_s=ended_at - update.started_at,
            pause_call_s=update.paused_at - update.started_at,
            load_s=loaded_at - update.in_session_at,
            resume_s=ended_at - loaded_at,
        )
        self._observe(times)
        return times

    async def abandon(self, update_id: str) -> None:
        """The trainer gives the update up."""
        update = self._current_update(update_id)
        update.progress.check(UpdateState.FAILED)
        if letting_go := self._fail(update, "the trainer abandoned it"):
            await letting_go

    def _current_group(self, name: str) -> WeightGroup:
        if self.group is None or self.group.name != name:
            raise GroupStaleError(
                f"weight group {name} is not the current one, {self.group.name if self.group else 'there is none'}; "
                "form a new one with POST /weight_groups"
            )
        return self.group

    def _current_update(self, update_id: str) -> WeightUpdate:
        if self.update is None or self.update.id != update_id:
            raise UnknownUpdateError(f"weight update {update_id} is not the current one; start one with POST /weight_updates")
        return self.update

    async def _prepare(self, update: WeightUpdate) -> None:
        self._gate.hold(Hold.WEIGHT_UPDATE)
        for engine in update.engines:
            engine.is_updating = True
            engine.has_early_labels = engine.is_overlapping and update.mode == "in_place"
        # The reply to pause has to be there before the session opens: sglang #25319.
        await self._step(update, lambda engine: self._post(engine, "pause_generation", {"mode": update.mode}))
        update.paused_at = time.perf_counter()
        await self._step(update, self._open_session)
        update.in_session_at = time.perf_counter()
        update.progress.advance(UpdateState.PAUSED, now=time.monotonic())

    async def _open_session(self, engine: Engine) -> None:
        try:
            await self._post(engine, "begin_weight_update", {})
        except EngineError as error:
            if "already open" not in str(error):
                raise
            await self._post(engine, "end_weight_update", {})
            await self._post(engine, "begin_weight_update", {})

    async def _step(self, update: WeightUpdate, action: Callable[[Engine], Awaitable[None]]) -> None:
        """`action` on all engines at once. If it fails on one the update fails, once the others are through."""
        results = await asyncio.gather(*(action(engine) for engine in update.engines), return_exceptions=True)
        errors = [result for result in results if isinstance(result, BaseException)]
        for error in errors:
            if not isinstance(error, EngineError):
                raise error
        if errors:
            self._fail(update, str(errors[0]))
            raise EngineError(str(errors[0])) from errors[0]

    async def _post(self, engine: Engine, path: str, payload: Mapping[str, object]) -> None:
        await self._registry.control(engine, path, payload, timeout_s=self._timeout_s)

    def _fail(self, update: WeightUpdate, reason: str) -> asyncio.Task[None] | None:
        """Ends the update at once, if it is not over; the engines follow in the task returned."""
        if not update.progress.fail(reason, now=time.monotonic()):
            return None
        self._metrics.weight_updates.labels(UpdateState.FAILED).inc()
        return self._tasks.create_task(self._let_go(update))

    async def _let_go(self, update: WeightUpdate) -> None:
        """Engines without any of a failed update's weights go on; the others stay paused, in no session and out of routing."""
        async with self._settling:
            await self._on_each(update.engines, "end_weight_update")
            if update.progress.was_loading:
                self._release(update.engines)
            else:
                await self._resume(update.engines)

    async def _resume(self, engines: Sequence[Engine]) -> None:
        """Generation goes on and calls pass. An engine that does not answer is a matter for its probes."""
        await self._on_each(engines, "continue_generation")
        self._release(engines)

    def _release(self, engines: Sequence[Engine]) -> None:
        for engine in engines:
            engine.is_updating = False
        self._registry.refresh()
        self._gate.release(Hold.WEIGHT_UPDATE)

    async def _on_each(self, engines: Sequence[Engine], path: str) -> None:
        async def post(engine: Engine) -> None:
            try:
                await engine.client.post(path, {}, timeout_s=min(CLEANUP_TIMEOUT_S, self._timeout_s))
            except EngineError as error:
                if path == "continue_generation":
                    self._registry.suspect(engine, str(error))

        async with asyncio.TaskGroup() as tasks:
            for engine in engines:
                tasks.create_task(post(engine))

    def _observe(self, times: UpdateTimes) -> None:
        self._metrics.weight_updates.labels(UpdateState.COMMITTED).inc()
        for step in ("pause", "pause_call", "load", "resume"):
            self._metrics.weight_update_seconds.labels(step).observe(getattr(times, f"{step}_s"))
