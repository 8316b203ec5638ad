"""Environments in threads of their own, so that one that blocks or computes does not hold up everybody's event loop.

Each thread runs an event loop for the environments given to it: what one opened in `reset` is on the same loop in `step`.

There are threads and no processes. An environment's state lives as long as its episode, so a process for it needs a protocol for
tools, errors, cancellation and a process that dies, and that is what an OpenEnv server (`url`) has already.
"""

import asyncio
import concurrent.futures
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from services.env_agents.environment import Action, Environment, Message, Step, Task
from shared.errors import EpisodeError

Answer = TypeVar("Answer")


class _Worker:
    """A thread with an event loop, and how many environments are its own."""

    def __init__(self, number: int) -> None:
        self.num_environments = 0
        self._loop = asyncio.new_event_loop()
        # A daemon: an environment that hangs must not keep the process from ending.
        threading.Thread(target=self._loop.run_forever, name=f"environment-loop-{number}", daemon=True).start()

    def submit(self, call: Callable[[], Awaitable[Answer]]) -> concurrent.futures.Future[Answer]:
        return asyncio.run_coroutine_threadsafe(_without_exit(call), self._loop)


async def _without_exit(call: Callable[[], Awaitable[Answer]]) -> Answer:
    """A SystemExit would end the thread, and with it the other environments in it."""
    try:
        return await call()
    except SystemExit as error:
        raise EpisodeError(f"the environment called sys.exit({error.code})") from error


class EnvironmentThreads:
    """At most `limit` threads, started as they are needed; a new environment goes where the fewest are.

    An environment that hangs keeps its thread, so new ones stay away from there while there are others.
    """

    def __init__(self, limit: int = 64) -> None:
        self._limit = limit
        self._workers: list[_Worker] = []

    def take(self) -> _Worker:
        """The thread for one more environment; `give_back` when that is closed."""
        worker = min(self._workers, key=lambda worker: worker.num_environments, default=None)
        if worker is None or (worker.num_environments > 0 and len(self._workers) < self._limit):
            worker = _Worker(len(self._workers))
            self._workers.append(worker)
        worker.num_environments += 1
        return worker

    def give_back(self, worker: _Worker) -> None:
        worker.num_environments -= 1


@dataclass(frozen=True)
class _Seen:
    """What the agent asks an environment without awaiting, as it was after the last call."""

    state: str | None = None
    tool_specs: list[Mapping[str, Any]] | None = None


class ThreadedEnvironment(Environment):
    """An environment that lives in a thread, from its constructor to its `close`. Deadlines hold though it blocks the thread."""

    def __init__(self, create: Callable[[], Environment], threads: EnvironmentThreads) -> None:
        self._create = create
        self._threads = threads
        self._worker = threads.take()
        self._environment: Environment | None = None
        self._seen = _Seen()

    async def open(self) -> None:
        await self._in_thread(self._open)

    async def reset(self, task: Task) -> list[Message]:
        return await self._run(lambda environment: environment.reset(task))

    async def step(self, action: Action) -> Step:
        return await self._run(lambda environment: environment.step(action))

    async def close(self) -> None:
        closing = asyncio.wrap_future(self._worker.submit(self._close))
        closing.add_done_callback(lambda _: self._threads.give_back(self._worker))
        await asyncio.shield(closing)  # It waits for its turn in the thread, however late that comes.

    def state(self) -> str | None:
        return self._seen.state

    def tool_specs(self) -> list[Mapping[str, Any]]:
        return self._seen.tool_specs or []

    def only_scores(self, action: Action) -> bool:
        return self._environment is not None and self._environment.only_scores(action)

    async def _run(self, call: Callable[[Environment], Awaitable[Answer]]) -> Answer:
        answer, self._seen = await self._in_thread(lambda: self._call(call))
        return answer

    async def _in_thread(self, call: Callable[[], Awaitable[Answer]]) -> Answer:
        return await asyncio.wrap_future(self._worker.submit(call))

    async def _open(self) -> None:
        self._environment = self._create()
        await self._environment.open()

    async def _call(self, call: Callable[[Environment], Awaitable[Answer]]) -> tuple[Answer, _Seen]:
        assert self._environment is not None, "an environment is opened first"
        answer = await call(self._environment)
        if isinstance(answer, Step) and answer.done:  # Nobody asks any more.
            return answer, self._seen
        return answer, _Seen(self._environment.state(), self._environment.tool_specs())

    async def _close(self) -> None:
        if self._environment is not None:
            await self._environment.close()
