"""Starts the processes of a run in stages, keeps them up, and stops them in the reverse order.

A process that ends unasked is started again as the restart policy says. The run ends with the first of: its last process (`run`) or
the caller's work (`serve`) finishing, a process that is not started again, a signal. Whatever ended it, every process is gone when
these return.
"""

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from services.standalone.keeper import Keeper, Member
from services.standalone.observer import Observer
from services.standalone.restarts import NO_RESTARTS, RestartPolicy

T = TypeVar("T")


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

    def __init__(self, log_directory: Path, observer: Observer, *, restarts: RestartPolicy = NO_RESTARTS) -> None:
        self._log_directory = log_directory
        self._observer = observer
        self._restarts = restarts
        self._stages: list[list[Keeper]] = []
        self._stop_requested: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._hurry = asyncio.Event()

    def request_stop(self, signal_number: int) -> None:
        if self._stop_requested.done():
            self._hurry.set()
        else:
            self._stop_requested.set_result(signal_number)

    async def run(self, stages: Sequence[Stage], *, before_shutdown: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        """Returns when the last process of `stages` has finished; `before_shutdown` then runs while the others still do.

        Raises: ProcessError if another process ended for good, or the last one failed; StopRequested on a signal.
        """
        try:
            await self._start_all(stages, last=stages[-1].members[-1])
            await self._until_last_finishes()
            if before_shutdown:
                await self._guarded(before_shutdown(), expected=self._keepers[-1:])
        finally:
            await self._stop_all()

    async def serve(self, stages: Sequence[Stage], work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Runs `work` as soon as every process of `stages` is ready, and returns when it has ended.

        Raises: ProcessError if a process ended for good before; StopRequested on a signal; what `work` raises.
        """
        try:
            await self._start_all(stages)
            await self._guarded(work())
        finally:
            await self._stop_all()

    @property
    def _keepers(self) -> list[Keeper]:
        return [keeper for stage in self._stages for keeper in stage]

    async def _start_all(self, stages: Sequence[Stage], *, last: Member | None = None) -> None:
        """Args: last: the process that may finish."""
        waited_for: list[Keeper] = []
        for stage in stages:
            if stage.needs_previous:
                await self._until_ready(waited_for)
                waited_for = []
            self._stages.append([])
            for member in stage.members:
                waited_for.append(await self._start(member, may_finish=member is last))
        await self._until_ready(waited_for)

    async def _start(self, member: Member, *, may_finish: bool) -> Keeper:
        keeper = Keeper(member, self._log_directory, self._observer, self._restarts, may_finish=may_finish)
        await keeper.start()
        self._stages[-1].append(keeper)
        return keeper

    async def _until_ready(self, started: Collection[Keeper]) -> None:
        may_finish = [keeper for keeper in started if keeper.may_finish]
        await self._guarded(_together(keeper.ready() for keeper in started), expected=may_finish)

    async def _until_last_finishes(self) -> None:
        last = self._keepers[-1]
        await self._guarded(asyncio.wait({last.over}), expected=[last])
        if last.status != 0:
            raise last.error()

    async def _guarded(self, work: Coroutine[Any, Any, T], *, expected: Collection[Keeper] = ()) -> T:
        """The result of `work`, given up when a process ends for good that is not `expected` to, or on a signal."""
        task = asyncio.create_task(work)
        keeper_by_task = {keeper.over: keeper for keeper in self._keepers if keeper not in expected}
        try:
            endings: list[asyncio.Future[Any]] = [task, self._stop_requested, *keeper_by_task]
            await asyncio.wait(endings, return_when=asyncio.FIRST_COMPLETED)
            if self._stop_requested.done():
                raise StopRequested(self._stop_requested.result())
            if ended := [keeper for over, keeper in keeper_by_task.items() if over.done()]:
                first = min(ended, key=lambda keeper: keeper.ended_at)
                first.over.result()
                raise first.error()
            return task.result()
        finally:
            task.cancel()
            await asyncio.wait({task})

    async def _stop_all(self) -> None:
        for stage in reversed(self._stages):
            await _together(keeper.stop(hurry=self._hurry) for keeper in stage)


async def _together(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """All of it at the same time; the first error ends the rest."""
    try:
        async with asyncio.TaskGroup() as tasks:
            for one in work:
                tasks.create_task(one)
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors
