"""One process of a run over all its lives: started, watched, and started again when it ends unasked."""

import asyncio
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from services.standalone import restarts
from services.standalone.child import Child, describe_status
from services.standalone.logs import ProcessLog
from services.standalone.observer import Observer, State
from services.standalone.processes import ProcessSpec
from services.standalone.readiness import Probe, wait_until
from services.standalone.restarts import STEADY_S, EndedLife, RestartPolicy
from shared.errors import ProcessError


@dataclass(frozen=True)
class Member:
    """A process, how to tell that it is ready if anybody waits for it, and the file descriptors that it keeps open."""

    spec: ProcessSpec
    is_ready: Probe | None = None
    ready_timeout_s: float = 0.0
    inherited: Collection[int] = ()


class Keeper:
    """STARTING → READY, or RUNNING if nobody can ask, → STARTING again … → STOPPING → STOPPED.

    `over` ends when the process has ended and is not started again: asked to stop, finished if it `may_finish`, or given up.
    """

    def __init__(self, member: Member, log_directory: Path, observer: Observer, policy: RestartPolicy, *, may_finish: bool) -> None:
        self._member = member
        self._log_directory = log_directory
        self._observer = observer
        self._policy = policy
        self.may_finish = may_finish
        self._restarted_at: list[float] = []
        self._short_lives = 0
        self._is_stopping = asyncio.Event()
        self._beginning = asyncio.Lock()
        """Nobody stops a process that is just being started."""
        self._was_ready = False
        self._first_ready: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._child: Child
        self.over: asyncio.Task[None]

    @property
    def name(self) -> str:
        return self._member.spec.name

    @property
    def status(self) -> int | None:
        """Of the newest life."""
        return self._child.status

    @property
    def ended_at(self) -> float:
        return self._child.ended_at or 0.0

    async def start(self) -> None:
        await self._begin()
        self.over = asyncio.create_task(self._keep(), name=f"{self.name} over all its lives")

    async def ready(self) -> None:
        """Returns when the first life is ready. Raises: ProcessError if that takes too long."""
        if not await asyncio.shield(self._first_ready):
            raise ProcessError(
                f"{self.name} must be ready within {self._member.ready_timeout_s:g} s and is not; see {self._child.log.path}",
                last_lines=self._child.log.last_lines,
            )

    async def stop(self, *, hurry: asyncio.Event) -> None:
        self._is_stopping.set()
        async with self._beginning:
            if not self._child.life.done():
                self._observer.state_changed(self.name, State.STOPPING, time.monotonic() - self._child.started_at)
            stopping_since = time.monotonic()
            await self._child.stop(hurry=hurry)
        self.over.cancel()
        await asyncio.wait({self.over})
        self._observer.state_changed(self.name, State.STOPPED, time.monotonic() - stopping_since)

    def error(self) -> ProcessError:
        """How it ended, when nobody wanted it to."""
        child = self._child
        assert child.status is not None
        assert child.ended_at is not None
        again = f", and had been started again {len(self._restarted_at)} times" if self._restarted_at else ""
        return ProcessError(
            f"{self.name} {describe_status(child.status)} after {child.ended_at - child.started_at:.0f} s{again}; "
            f"see {child.log.path}",
            last_lines=child.log.last_lines,
        )

    async def _begin(self) -> None:
        self._observer.state_changed(self.name, State.STARTING, 0.0)
        log = ProcessLog(self.name, self._log_directory, self._observer.line_written)
        self._was_ready = False
        self._child = await Child.start(self._member.spec, log, inherited=self._member.inherited)

    async def _keep(self) -> None:
        while True:
            await self._live()
            if self._is_stopping.is_set() or (self.may_finish and self._child.status == 0):
                return
            delay_s = self._delay_s()
            if delay_s is None:
                return
            assert self._child.status is not None
            self._observer.restarts(self.name, describe_status(self._child.status), delay_s)
            await asyncio.sleep(delay_s)
            async with self._beginning:
                if self._is_stopping.is_set():
                    return
                self._restarted_at.append(time.monotonic())
                await self._begin()

    async def _live(self) -> None:
        """Until this life has ended. A later one that does not get ready in time is ended, and counts as any other."""
        child = self._child
        becoming_ready = asyncio.create_task(self._become_ready(child))
        try:
            await asyncio.wait({child.life, becoming_ready}, return_when=asyncio.FIRST_COMPLETED)
            if becoming_ready.done() and not becoming_ready.result() and self._restarted_at:
                await child.stop(hurry=asyncio.Event())
            await asyncio.wait({child.life})
        finally:
            becoming_ready.cancel()
            await asyncio.wait({becoming_ready})

    async def _become_ready(self, child: Child) -> bool:
        member = self._member
        if member.is_ready is None:
            self._was_ready, state = True, State.RUNNING
        else:
            self._was_ready, state = await wait_until(member.is_ready, timeout_s=member.ready_timeout_s), State.READY
        if self._was_ready:
            self._observer.state_changed(self.name, state, time.monotonic() - child.started_at)
        if not self._first_ready.done():
            self._first_ready.set_result(self._was_ready)
        return self._was_ready

    def _delay_s(self) -> float | None:
        child = self._child
        assert child.status is not None
        assert child.ended_at is not None
        lived_s = child.ended_at - child.started_at
        self._short_lives = 0 if lived_s >= STEADY_S else self._short_lives + 1
        life = EndedLife(
            is_first=not self._restarted_at,
            status=child.status,
            lived_s=lived_s,
            was_ready=None if self._member.is_ready is None else self._was_ready,
        )
        return restarts.delay_s(life, self._short_lives, self._restarted_at, self._policy, now=time.monotonic())
