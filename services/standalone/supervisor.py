"""Starts the processes of a run in stages, watches them, and stops them in the reverse order.

Each process is STARTING → READY → STOPPING → STOPPED; one that nobody waits for is RUNNING instead of READY. The run ends with
the first of: its last process (`run`) or the caller's work (`serve`) finishing, any other process ending, a signal. Whatever
ended it, every process is gone when these return.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol, TypeVar

from services.standalone.child import Child, describe_status
from services.standalone.logs import ProcessLog
from services.standalone.processes import ProcessSpec
from services.standalone.readiness import Probe, wait_until
from shared.errors import ProcessError

T = TypeVar("T")


class State(StrEnum):
    STARTING = "starting"
    READY = "ready"
    RUNNING = "running"
    STOPPING = "stopping"
    STOPPED = "stopped"


class Observer(Protocol):
    """Who is told what happens; called from the event loop, so it must not block."""

    def state_changed(self, name: str, state: State, seconds: float) -> None:
        """`seconds` since the state before it."""

    def line_written(self, name: str, line: str) -> None:
        """One line of a process's output."""


@dataclass(frozen=True)
class Member:
    """A process, how to tell that it is ready if anybody waits for it, and the file descriptors that it keeps open."""

    spec: ProcessSpec
    is_ready: Probe | None = None
    ready_timeout_s: float = 0.0
    inherited: Collection[int] = ()


@dataclass(frozen=True)
class Stage:
    """Processes that start together. `needs_previous`: only when all those started before are ready."""

    members: Sequence[Member]
    needs_previous: bool = True


class StopRequested(Exception):  # noqa: N818 - not an error: somebody asked
    """A signal asked for the end of the run."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal_number)
        self.signal_number = signal_number


class Supervisor:
    """One run's processes. `request_stop` is for signal handlers: called twice, it makes the stop immediate."""

    def __init__(self, log_directory: Path, observer: Observer) -> None:
        self._log_directory = log_directory
        self._observer = observer
        self._stages: list[list[Child]] = []
        self._stop_requested: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._hurry = asyncio.Event()

    def request_stop(self, signal_number: int) -> None:
        if self._stop_requested.done():
            self._hurry.set()
        else:
            self._stop_requested.set_result(signal_number)

    async def run(self, stages: Sequence[Stage], *, before_shutdown: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        """Returns when the last process of `stages` has finished; `before_shutdown` then runs while the others still do.

        Raises: ProcessError if another process ended, or the last one failed; StopRequested on a signal.
        """
        try:
            await self._start_all(stages)
            await self._until_last_finishes()
            if before_shutdown:
                await self._guarded(before_shutdown(), expected=self._children[-1:])
        finally:
            await self._stop_all()

    async def serve(self, stages: Sequence[Stage], work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Runs `work` as soon as every process of `stages` is ready, and returns when it has ended.

        Raises: ProcessError if a process ended before; StopRequested on a signal; what `work` raises.
        """
        try:
            await self._start_all(stages)
            await self._guarded(work())
        finally:
            await self._stop_all()

    @property
    def _children(self) -> list[Child]:
        return [child for stage in self._stages for child in stage]

    async def _start_all(self, stages: Sequence[Stage]) -> None:
        waited_for: list[tuple[Child, Member]] = []
        for stage in stages:
            if stage.needs_previous:
                await self._until_ready(waited_for)
                waited_for = []
            self._stages.append([])
            for member in stage.members:
                waited_for.append((await self._start(member), member))
        await self._until_ready(waited_for)

    async def _start(self, member: Member) -> Child:
        self._observer.state_changed(member.spec.name, State.STARTING, 0.0)
        log = ProcessLog(member.spec.name, self._log_directory, self._observer.line_written)
        child = await Child.start(member.spec, log, inherited=member.inherited)
        self._stages[-1].append(child)
        return child

    async def _until_ready(self, started: Collection[tuple[Child, Member]]) -> None:
        await self._guarded(_together(self._become_ready(child, member) for child, member in started))

    async def _become_ready(self, child: Child, member: Member) -> None:
        if member.is_ready is None:
            self._observer.state_changed(child.name, State.RUNNING, time.monotonic() - child.started_at)
            return
        if not await wait_until(member.is_ready, timeout_s=member.ready_timeout_s):
            raise ProcessError(
                f"{child.name} must be ready within {member.ready_timeout_s:g} s and is not; see {child.log.path}",
                last_lines=child.log.last_lines,
            )
        self._observer.state_changed(child.name, State.READY, time.monotonic() - child.started_at)

    async def _until_last_finishes(self) -> None:
        last = self._children[-1]
        await self._guarded(asyncio.wait({last.life}), expected=[last])
        if last.status != 0:
            raise _ended(last)

    async def _guarded(self, work: Coroutine[Any, Any, T], *, expected: Collection[Child] = ()) -> T:
        """The result of `work`, given up when a process ends that is not `expected` to, or on a signal."""
        task = asyncio.create_task(work)
        lives = {child.life: child for child in self._children if child not in expected}
        try:
            endings: list[asyncio.Future[Any]] = [task, self._stop_requested, *lives]
            await asyncio.wait(endings, return_when=asyncio.FIRST_COMPLETED)
            if self._stop_requested.done():
                raise StopRequested(self._stop_requested.result())
            if ended := [child for life, child in lives.items() if life.done()]:
                raise _ended(min(ended, key=lambda child: child.ended_at or 0.0))
            return task.result()
        finally:
            task.cancel()
            await asyncio.wait({task})

    async def _stop_all(self) -> None:
        for stage in reversed(self._stages):
            await _together(self._stop(child) for child in stage)

    async def _stop(self, child: Child) -> None:
        if not child.life.done():
            self._observer.state_changed(child.name, State.STOPPING, time.monotonic() - child.started_at)
        stopping_since = time.monotonic()
        await child.stop(hurry=self._hurry)
        self._observer.state_changed(child.name, State.STOPPED, time.monotonic() - stopping_since)


def _ended(child: Child) -> ProcessError:
    assert child.status is not None
    assert child.ended_at is not None
    seconds = child.ended_at - child.started_at
    return ProcessError(
        f"{child.name} {describe_status(child.status)} after {seconds:.0f} s; see {child.log.path}", last_lines=child.log.last_lines
    )


async def _together(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """All of it at the same time; the first error ends the rest."""
    try:
        async with asyncio.TaskGroup() as tasks:
            for one in work:
                tasks.create_task(one)
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors
